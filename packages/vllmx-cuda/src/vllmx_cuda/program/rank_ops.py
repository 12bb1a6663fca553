"""Communication between a model's ranks, on the step's stream and so in captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.op import Op
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.send import Send
from vllmx_core.ops.values import Value
from vllmx_core.ops.vocab_embedding import VocabEmbedding

from vllmx_cuda.device.memory import ITEM_BYTES
from vllmx_cuda.device.ranks import Ties
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, vector_width
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes

_ALIGNMENT = 256


def all_gather(op: AllGather, to: Lowering) -> Enqueue:
    """Gathers whole parts one after the other, then joins their columns."""
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


def combine(op: Combine, to: Lowering) -> Enqueue:
    """Each rank is sent the rows that it adds, of all ranks, as many of each: what tokens chose is
    not known on the host. It adds what counts, and all gather the sums."""
    ranks, x, y, ids = to.others(), to.place(op.x), to.place(op.out), to.place(op.ids)
    count, width, chosen, experts = len(op.ends), op.x.width, op.ids.width, op.ends[-1]
    assert op.ends == tuple(_stretch(experts, rank, count)[1] for rank in range(count))
    parts, kernel = to.scratch.gathered, to.variant("add_held", VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        stretches = [_stretch(sizes.tokens, rank, count) for rank in range(count)]
        counts = [(end - begin) * width for begin, end in stretches]
        begin, end = stretches[ranks.rank]
        ranks.all_to_all(x, parts, counts, to.dtype)
        sums = parts.at(-(-to.item_bytes(width) * count * (end - begin) // _ALIGNMENT) * _ALIGNMENT)
        if end > begin:
            shape = {"rows": end - begin, "width": width}
            which = ids.at(4 * begin * chosen)
            arguments = (parts, which, sums, width, chosen, experts, count)
            to.device.launch(kernel, shape, arguments)
        ranks.all_gather(sums, y, counts, to.dtype)

    return enqueue


def combined_bytes(op: Combine, tokens: int, item: int) -> int:
    """Bytes of the rows that a rank receives, and of its sums."""
    most = -(-tokens // len(op.ends))
    return (len(op.ends) + 1) * most * op.x.width * item + _ALIGNMENT


def _stretch(whole: int, rank: int, count: int) -> tuple[int, int]:
    """The rank's part of an even split."""
    return whole * rank // count, whole * (rank + 1) // count


def send(op: Send, to: Lowering) -> Enqueue:
    ranks, x, width = to.others(), to.place(op.x), op.x.width

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        ranks.send(x, sizes.tokens * width, to.dtype)

    return enqueue


def recv(op: Recv, to: Lowering) -> Enqueue:
    ranks, y, width = to.others(), to.place(op.out), op.out.width

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        ranks.recv(y, sizes.tokens * width, to.dtype)

    return enqueue


def ties_of(ops: Sequence[Op], dtype: str) -> Ties:
    """Returns the kinds of communication that these ops need."""
    sums = (op.x.width for op in ops if isinstance(op, AllReduce) and op.x.dtype == "model")

    def has(*kinds: type[Op]) -> bool:
        return any(isinstance(op, kinds) for op in ops)

    return Ties(
        meets=has(AllReduce, AllGather, Combine),
        exchanges=has(Combine),
        sends=has(Send),
        receives=has(Recv),
        sums=max(sums, default=0),
        item=ITEM_BYTES[dtype],
    )


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
