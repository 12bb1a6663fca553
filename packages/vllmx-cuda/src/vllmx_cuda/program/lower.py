"""Lowers a recorded step to launches: each op becomes a function that enqueues its kernels.

What such a function launches depends on a step's padded sizes alone, never on its values or
lengths: that is what makes a step of one size capturable.
"""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.match_rms import FLOOR, MatchRms
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.patches import Patches
from vllmx_core.ops.place import Place
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.resize import Resize
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_at import ScaleAt
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.send import Send
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.ops.sparsify import Sparsify
from vllmx_core.ops.spread import Spread
from vllmx_core.ops.tap import Tap
from vllmx_core.ops.values import Value
from vllmx_core.ops.vocab_embedding import VocabEmbedding
from vllmx_core.recorded.op_table import OpTable
from vllmx_core.recorded.passes import read_at_once

from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.kernel_specs import Variant, vector_width
from vllmx_cuda.kernel_specs.codes8 import CODES
from vllmx_cuda.kernel_specs.rows import ACTIVATIONS, GATES
from vllmx_cuda.program.attention_ops import attention, can_attend, segment_attention
from vllmx_cuda.program.expert_ops import can_multiply, can_route, experts, route
from vllmx_cuda.program.fused_ops import (
    GatedProduct,
    NormedProduct,
    gated_product,
    normed_product,
    parts_of,
)
from vllmx_cuda.program.image_ops import keep, merge, mix, patches, place, turn
from vllmx_cuda.program.indexer_ops import can_index, indexer
from vllmx_cuda.program.latent_ops import can_attend as can_attend_to_latents
from vllmx_cuda.program.latent_ops import latent_attention
from vllmx_cuda.program.layout import place_turned
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.norm_ops import add_rms_norm, head_norm, rms_norm
from vllmx_cuda.program.one_shot import SummedNorm, all_reduce, summed_norm
from vllmx_cuda.program.rank_ops import all_gather, combine, recv, send, vocab_embedding
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.state_ops import can_hold, recurrence, short_conv
from vllmx_cuda.program.step_arrays import FirstTokens, StepSizes, table_rows


def lower(steps: OpList, to: Lowering) -> list[Enqueue]:
    """Launches of the rotations with axes, each once, then of the ops in order. A norm read only by
    the linear right behind it may write that linear's codes."""
    flat = replace(steps, ops=tuple(part for op in steps.ops for part in parts_of(op)))
    for norm, following in read_at_once(flat):
        if not isinstance(norm, RmsNorm | AddRmsNorm):
            continue
        if isinstance(following, Linear | GatedProduct):
            to.fed[norm.out] = to.product(following.x, following.w, following.out)
    to.rotations.update(place_turned(to.scratch.turned, steps.ops, to.max_tokens))
    launches = [_where_rows(op, OPS(op, to)) for op in steps.ops]
    to.fed.clear()  # products refer to `to`: a cycle would keep the device's memory
    return [*(turn(one, to) for one in to.rotations), *launches]


def _where_rows(op: Op, enqueue: Enqueue) -> Enqueue:
    """Skips an op whose results are logit rows in steps that have none."""
    if any(value.rows == "T" for value in op.writes or op.reads):
        return enqueue

    def enqueue_some(sizes: StepSizes, step: StepMemory) -> None:
        if sizes.logit_rows:
            enqueue(sizes, step)

    return enqueue_some


OPS: OpTable[Lowering, Enqueue] = OpTable("cuda")
OPS.add(Attention, when=can_attend)(attention)
OPS.add(SegmentAttention, when=can_attend)(segment_attention)
OPS.add(LatentAttention, when=can_attend_to_latents)(latent_attention)
OPS.add(Indexer, when=can_index)(indexer)
OPS.add(RmsNorm)(rms_norm)
OPS.add(AddRmsNorm)(add_rms_norm)
OPS.add(HeadNorm)(head_norm)
OPS.add(Route, when=can_route)(route)
OPS.add(Experts, when=can_multiply)(experts)
OPS.add(ShortConv)(short_conv)
OPS.add(Recurrence, when=can_hold)(recurrence)
OPS.add(Patches)(patches)
OPS.add(Mix)(mix)
OPS.add(Merge)(merge)
OPS.add(Keep)(keep)
OPS.add(Place)(place)
OPS.add(Tap)(keep)
OPS.add(AllReduce)(all_reduce)
OPS.add(SummedNorm)(summed_norm)
OPS.add(AllGather)(all_gather)
OPS.add(Combine)(combine)
OPS.add(Send)(send)
OPS.add(Recv)(recv)
OPS.add(VocabEmbedding)(vocab_embedding)


@OPS.add(Embedding)
def _embedding(op: Embedding, to: Lowering) -> Enqueue:
    gather = to.matrix(op.w).gather(to, to.place(op.out))
    rows = None if op.ids.source == "tokens" else table_rows(op)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        gather(step.tokens if rows is None else step.arrays[rows], sizes.tokens)

    return enqueue


@OPS.add(Linear)
def _linear(op: Linear, to: Lowering) -> Enqueue:
    return _product(op, to)


def _product(op: Linear | GatedProduct, to: Lowering) -> Enqueue:
    fed = to.fed.get(op.x)
    product = fed or to.product(op.x, op.w, op.out)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.of(op.x.rows)
        ready = product.codes(count) if fed else None
        by_norm = ready is not None and ready.kind in CODES
        product.enqueue(count, ready if by_norm else None)

    return enqueue


@OPS.add(Head)
def _head(op: Head, to: Lowering) -> Enqueue:
    matrix, cap = to.matrix(op.w), op.softcap
    x, y, rows = to.place(op.x), to.place(op.out), to.scratch.rows
    gather = to.variant("gather_rows", VX_VEC=vector_width(matrix.cols))
    product = matrix.product(to, rows, y, "f32")
    to.shapes.setdefault(("L", *matrix.shape), ("L", product.enqueue))
    softcap = to.variant("softcap", VX_VEC=vector_width(matrix.rows)) if cap else None

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.logit_rows
        shape = {"rows": count, "width": matrix.cols}
        to.device.launch(gather, shape, (step.logit_rows, x, rows, matrix.cols))
        product.enqueue(count)
        if softcap is not None and cap is not None:
            values = count * matrix.rows
            to.device.launch(softcap, {"count": values}, (y, values, cap))

    return enqueue


@OPS.add(Spread)
def _spread(op: Spread, to: Lowering) -> Enqueue:
    x, sources, y = to.place(op.x), to.vector(op.sources), to.place(op.out)
    arguments = (x, sources, y, op.out.width, op.x.width)
    return _by_rows(to, to.variant("spread", VX_VEC=1), op.out, arguments)


@OPS.add(Resize)
def _resize(op: Resize, to: Lowering) -> Enqueue:
    width, sizes = op.out.width, (op.kept, op.size, op.resized)
    kernel = to.variant("resize", VX_VEC=vector_width(*sizes))
    arguments = (to.place(op.x), to.place(op.out), width, op.x.width, *sizes)
    return _by_rows(to, kernel, op.out, arguments)


@OPS.add(Pool, when=lambda op: op.kind != "max")
def _pool(op: Pool, to: Lowering) -> Enqueue:
    x, y, width = to.place(op.x), to.place(op.out), op.x.width
    entry = "pool_mean" if op.kind == "mean" else "gather_rows"
    kernel = to.variant(entry, VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape, last = {"rows": sizes.logit_rows, "width": width}, step.logit_rows
        if op.kind == "mean":
            ends = step.arrays[FirstTokens()], last
            to.device.launch(kernel, shape, (x, *ends, y, width))
            return
        picked = last if op.kind == "last" else step.arrays[FirstTokens()]
        to.device.launch(kernel, shape, (picked, x, y, width))

    return enqueue


@OPS.add(LayerNorm)
def _layer_norm(op: LayerNorm, to: Lowering) -> Enqueue:
    width, vec = op.x.width, vector_width(op.x.width)
    arguments = (
        to.place(op.x),
        to.vector(op.w),
        to.vector(op.bias),
        to.place(op.out),
        width,
        op.eps,
    )
    return _by_rows(to, to.variant("layer_norm", VX_VEC=vec), op.out, arguments)


@OPS.add(MatchRms)
def _match_rms(op: MatchRms, to: Lowering) -> Enqueue:
    kernel = to.variant("match_rms", VX_VEC=vector_width(op.x.width))
    arguments = (to.place(op.x), to.place(op.y), to.place(op.out), op.x.width, FLOOR)
    return _by_rows(to, kernel, op.out, arguments)


@OPS.add(Sparsify)
def _sparsify(op: Sparsify, to: Lowering) -> Enqueue:
    kernel = to.variant("sparsify", VX_VEC=vector_width(op.x.width))
    arguments = (to.place(op.x), to.place(op.out), op.x.width, op.deviations)
    return _by_rows(to, kernel, op.out, arguments)


@OPS.add(GatedAct, when=lambda op: op.limit is None)
def _gated_act(op: GatedAct, to: Lowering) -> Enqueue:
    width, act = op.out.width, GATES[op.kind]
    kernel = to.variant("gated_act", VX_VEC=vector_width(width), VX_ACT=act)
    return _by_rows(to, kernel, op.out, (to.place(op.gate_up), to.place(op.out), width))


@OPS.add(GatedProduct)
def _gated_product(op: GatedProduct, to: Lowering) -> Enqueue:
    return gated_product(op, to, _product(op, to), _act_of(op, to))


@OPS.add(NormedProduct)
def _normed_product(op: NormedProduct, to: Lowering) -> Enqueue:
    parts = [OPS(op.first, to), OPS(op.norm, to), _product(op.second, to)]
    act = _act_of(op.second, to) if isinstance(op.second, GatedProduct) else None
    return normed_product(op, to, parts if act is None else [*parts, act], act)


def _act_of(op: GatedProduct, to: Lowering) -> Enqueue:
    return _gated_act(GatedAct(op.out, op.kind, op.gated), to)


@OPS.add(Act)
def _activation(op: Act, to: Lowering) -> Enqueue:
    width, act = op.out.width, ACTIVATIONS[op.kind]
    kernel = to.variant("activation", VX_VEC=vector_width(width), VX_ACT=act)
    return _by_rows(to, kernel, op.out, (to.place(op.x), to.place(op.out), width))


@OPS.add(Add)
def _add(op: Add, to: Lowering) -> Enqueue:
    return _flat(to, "add", (op.x, op.y), op.out)


@OPS.add(Scale)
def _scale(op: Scale, to: Lowering) -> Enqueue:
    return _flat(to, "scale", (op.x,), op.out, op.factor)


@OPS.add(ScaleAt)
def _scale_at(op: ScaleAt, to: Lowering) -> Enqueue:
    width, some = op.x.width, op.features
    kernel = to.variant("scale_at", VX_VEC=vector_width(width, some))
    x, table, y = to.place(op.x), to.vector(op.table), to.place(op.out)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape = {"rows": sizes.tokens, "width": width}
        to.device.launch(kernel, shape, (x, table, step.positions, y, width, some))

    return enqueue


@OPS.add(ScaleBy)
def _scale_by(op: ScaleBy, to: Lowering) -> Enqueue:
    width, span = op.x.width, op.span
    kernel = to.variant("scale_by", VX_VEC=_shared_vector(width, span))
    arguments = (to.place(op.x), to.vector(op.w), to.place(op.out), width, span)
    return _by_rows(to, kernel, op.out, arguments)


@OPS.add(Gate)
def _gate(op: Gate, to: Lowering) -> Enqueue:
    width, span = op.x.width, op.span
    options = {"VX_ACT": GATES[op.kind], "VX_WIDE": int(op.g.dtype == "f32")}
    kernel = to.variant("gate", VX_VEC=_shared_vector(width, span), **options)
    arguments = (to.place(op.x), to.place(op.g), to.place(op.out), width, span)
    return _by_rows(to, kernel, op.out, arguments)


@OPS.add(Clip)
def _clip(op: Clip, to: Lowering) -> Enqueue:
    y, bounds, pitch = to.place(op.out), to.vector(op.bounds), op.out.width
    assert bounds is not None
    launches = []
    for index, (x, first) in enumerate(zip(op.reads, op.firsts, strict=True)):
        kernel = to.variant("clip", VX_VEC=vector_width(x.width, pitch, first))
        place = y.at(first * ITEM_BYTES[to.dtype])
        arguments = (to.place(x), bounds.at(8 * index), place, x.width, pitch)
        launches.append((kernel, x.width, arguments))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = sizes.of(op.out.rows)
        for kernel, width, arguments in launches:
            to.device.launch(kernel, {"rows": rows, "width": width}, arguments)

    return enqueue


def _shared_vector(width: int, span: int) -> int:
    """VX_VEC where so many neighbouring features share a factor: no thread has two of them."""
    return vector_width(width if span == 1 else span)


def _by_rows(
    to: Lowering, kernel: Variant, out: Value, arguments: tuple[Memory | int | float | None, ...]
) -> Enqueue:
    """A kernel whose grid is the rows of its result."""

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape = {"rows": sizes.of(out.rows), "width": out.width}
        to.device.launch(kernel, shape, arguments)

    return enqueue


def _flat(
    to: Lowering, entry: str, operands: tuple[Value, ...], out: Value, *values: float
) -> Enqueue:
    """A kernel over all elements alike."""
    inputs, y, width = [to.place(value) for value in operands], to.place(out), out.width
    kernel = to.variant(entry, VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.of(out.rows) * width
        to.device.launch(kernel, {"count": count}, (*inputs, y, count, *values))

    return enqueue
