"""What ranks of a model say to each other, on the step's stream and so in captured graphs."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.values import Value
from vllmx_core.ops.vocab_embedding import VocabEmbedding

from vllmx_cuda.device.dtypes import ITEM_BYTES
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, vector_width
from vllmx_cuda.program.staging import StepMemory, StepSizes

if TYPE_CHECKING:
    from vllmx_cuda.program.lower import Enqueue, Lowering


def all_reduce(op: AllReduce, to: Lowering) -> Enqueue:
    ranks, x, y = to.others(), to.place(op.x), to.place(op.out)
    dtype = _dtype(op.x, to)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        ranks.all_reduce(x, y, sizes.of(op.x.rows) * op.x.width, dtype)

    return enqueue


def all_gather(op: AllGather, to: Lowering) -> Enqueue:
    """Whole parts one behind the other, then side by side."""
    ranks, x, y = to.others(), to.place(op.x), to.place(op.out)
    dtype, parts, pitch = _dtype(op.x, to), to.scratch.gathered, op.out.width
    item, firsts = ITEM_BYTES[dtype], [0, *accumulate(op.widths)]
    kernels = [
        KERNELS["join_columns"].variant(
            VX_DTYPE=DTYPES[dtype], VX_VEC=vector_width(width, pitch, first)
        )
        for first, width in zip(firsts, op.widths, strict=False)
    ]
    to.variants.extend(kernels)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = sizes.of(op.x.rows)
        ranks.all_gather(x, parts, [rows * width for width in op.widths], dtype)
        for first, width, kernel in zip(firsts, op.widths, kernels, strict=False):
            part, shape = parts.at(rows * first * item), {"rows": rows, "width": width}
            to.device.launch(kernel, shape, (part, y.at(first * item), width, pitch))

    return enqueue


def vocab_embedding(op: VocabEmbedding, to: Lowering) -> Enqueue:
    """A row that the table does not have is gathered as row 0, then cleared."""
    y, own, width, total = to.place(op.out), to.scratch.own_ids, op.out.width, op.w.rows
    gather, find = to.matrix(op.w).gather(to, y), to.variant("own_ids", VX_VEC=1)
    keep = to.variant("keep_own", VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count, ids = sizes.tokens, step.tokens
        to.device.launch(find, {"count": count}, (ids, own, count, op.first, total))
        gather(own, count)
        shape = {"rows": count, "width": width}
        to.device.launch(keep, shape, (ids, y, width, op.first, total))

    return enqueue


def _dtype(value: Value, to: Lowering) -> str:
    return to.dtype if value.dtype == "model" else "f32"
