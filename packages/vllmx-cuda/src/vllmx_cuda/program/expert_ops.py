"""Mixtures of experts as launches: slots are ordered by expert on the device, multiplied by tiles,
and added token by token. Nothing is read back, so a step of one size is capturable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllmx_core.ops.experts import Experts, ExpertsSpec
from vllmx_core.ops.op import Op
from vllmx_core.ops.route import Route

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import has_tensor_cores, vector_width
from vllmx_cuda.kernel_specs.experts import MAX_EXPERTS, MAX_GROUPS, SCORES, max_tiles
from vllmx_cuda.kernel_specs.gguf import RUN
from vllmx_cuda.kernel_specs.linear import MMA_K
from vllmx_cuda.kernel_specs.rows import ACTIVATIONS
from vllmx_cuda.program.expert_products import GEMV_TILE, expert_product
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes

CHUNK_TOKENS = 1024
"""Tokens that go through the experts at once: what lies between the products is bounded so."""
_ALIGNMENT = 256


def can_route(op: Route) -> bool:
    known = op.spec.score in SCORES and op.table is None
    return known and op.logits.width <= MAX_EXPERTS and op.spec.groups <= MAX_GROUPS


def route(op: Route, to: Lowering) -> Enqueue:
    spec, experts = op.spec, op.logits.width
    kernel = to.variant("route", VX_SCORE=SCORES[spec.score])
    logits, ids, weights = map(to.place, (op.logits, op.ids, op.slot_weights))
    vectors = to.vector(op.bias), to.vector(op.factor)
    choice = (
        spec.chosen,
        spec.groups,
        spec.groups_kept,
        int(spec.group_score == "best_two"),
        int(spec.renormalise),
        spec.eps,
        spec.scale,
    )

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape = {"tokens": sizes.tokens, "experts": experts, "groups": spec.groups}
        arguments = (logits, *vectors, ids, weights, sizes.tokens, experts, *choice)
        to.device.launch(kernel, shape, arguments)

    return enqueue


@dataclass(frozen=True, slots=True)
class Spaces:
    """Offsets of what lies between the launches of one op, in bytes."""

    place: int
    tiles: int
    wide: int
    """The offset of gate and up, then of the answers of all slots."""
    narrow: int
    """The offset of the input of the down projection."""
    codes: int
    """The offset of rows as codes of 8 bits, for blocks, and of their scales."""
    scales: int
    num_bytes: int

    @classmethod
    def of(cls, op: Experts, tokens: int, item_bytes: int) -> Spaces:
        slots, width = min(tokens, CHUNK_TOKENS) * op.ids.width, op.x.width
        wide = max(op.gate_up.rows * item_bytes, 4 * width)
        tiles = 12 * max_tiles(slots, op.gate_up.count, GEMV_TILE)
        offsets = [0]
        values = max(min(tokens, CHUNK_TOKENS) * width, slots * op.inner)
        coded = values, values // RUN * 8
        narrow = slots * op.inner * item_bytes
        for size in (4 * slots, 4 * slots, tiles, slots * wide, narrow, *coded):
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        return cls(*offsets[1:])


def can_multiply(op: Experts) -> bool:
    known = op.spec.activation in ACTIVATIONS and op.spec.alpha is not None
    return known and op.gate_up.count <= MAX_EXPERTS


def expert_stacks(ops: Sequence[Op]) -> frozenset[str]:
    """Names of the stacks that experts multiply by."""
    found = [op for op in ops if isinstance(op, Experts)]
    return frozenset(stack.name for op in found for stack in (op.gate_up, op.down))


def experts(op: Experts, to: Lowering) -> Enqueue:
    chosen, width, count = op.ids.width, op.x.width, op.gate_up.count
    x, ids, weights, y = map(to.place, (op.x, op.ids, op.slot_weights, op.out))
    scratch, spaces = to.scratch.experts, Spaces.of(op, to.max_tokens, to.item_bytes(1))
    order, place, tiles = scratch.at(0), scratch.at(spaces.place), scratch.at(spaces.tiles)
    wide, narrow = scratch.at(spaces.wide), scratch.at(spaces.narrow)
    whole = width % MMA_K == 0 and op.inner % MMA_K == 0
    mma = whole and has_tensor_cores(to.dtype, to.target.arch)
    up, down = to.matrix(op.gate_up), to.matrix(op.down)
    coded = scratch.at(spaces.codes), scratch.at(spaces.scales)
    rise = expert_product(to, up, op.gate_up.rows, to.dtype, chosen, coded, mma=mma)
    fall = expert_product(to, down, width, "f32", chosen, coded, mma=mma)
    widths = sorted(rise.kernels.keys() & fall.kernels.keys())
    activate = _activate(op.spec, op.inner, to)
    arrange = to.variant("experts_order", VX_VEC=vector_width(width))
    add = to.variant("experts_sum", VX_VEC=vector_width(width))

    def enqueue_chunk(first: int, tokens: int) -> None:
        slots, slot = tokens * chosen, 4 * first * chosen
        tile = next((width for width in widths if slots <= width * count), widths[-1])
        used = max_tiles(slots, count, tile)
        arguments = (ids.at(slot), order, place, tiles, slots, used, tile, op.first or 0, count)
        to.device.launch(arrange, {"experts": count}, arguments)
        own = x.at(first * to.item_bytes(width))
        rise.launch(to.device, tile, used, own, tokens, order, tiles, wide)
        activate(wide, narrow, slots)
        fall.launch(to.device, tile, used, narrow, slots, None, tiles, wide)
        out, shape = y.at(first * to.item_bytes(width)), {"rows": tokens, "width": width}
        to.device.launch(add, shape, (wide, place, weights.at(slot), out, width, chosen))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        for first in range(0, sizes.tokens, CHUNK_TOKENS):
            enqueue_chunk(first, min(CHUNK_TOKENS, sizes.tokens - first))

    return enqueue


def _activate(spec: ExpertsSpec, width: int, to: Lowering) -> Callable[[Memory, Memory, int], None]:
    """The activation between an expert's matrices, as a launch over a number of rows."""
    options, more = {"VX_VEC": vector_width(width)}, tuple[float, ...]()
    if spec.clamp is not None:
        kernel = to.variant("clamped_swiglu", **options)
        assert spec.alpha is not None, "see `can_multiply`"
        more = (spec.alpha, spec.clamp)
    else:
        entry = "gated_act" if spec.gated else "activation"
        kernel = to.variant(entry, **options, VX_ACT=ACTIVATIONS[spec.activation])

    def activate(x: Memory, y: Memory, rows: int) -> None:
        to.device.launch(kernel, {"rows": rows, "width": width}, (x, y, width, *more))

    return activate
