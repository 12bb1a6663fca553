"""Attention as launches: the store of keys and values, decoding by items, prompts by tiles.

Without pages (`segment_attention`) the same kernels run over the step's own keys and values: each
token is a page of one, and the block table of a row is the numbers of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllmx_core.ops.attention import Attention, AttentionSpec
from vllmx_core.ops.segment_attention import SegmentAttention

from vllmx_cuda.device.arch import number
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import KERNELS, has_tensor_cores
from vllmx_cuda.kernel_specs.attention import (
    KV_ELEM,
    decode_group,
    decode_vector,
    decodes_by_mma,
    group_tile,
    mma_group,
    prefill_keys,
    prefill_tile_tokens,
    prefills_by_wgmma,
    store_vector,
    wgmma_tile_tokens,
)
from vllmx_cuda.kernel_specs.images import MAX_AXES, MAX_FREQUENCIES
from vllmx_cuda.program.kv_cache import LayerPages
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import (
    LastSeen,
    Segments,
    StepSizes,
    TurnedRows,
    segment_arrays,
    segments_of_op,
)
from vllmx_cuda.program.work import TileKind, Visibility

HEAD_SIZES = KERNELS["paged_decode"].options["VX_HEAD"]
"""Heads that attention was written for."""


WGMMA_SWITCH = "VLLMX_CUDA_WGMMA"
"""1: prompts run through paged_prefill_wgmma where it supports them. 0 or unset: never, because no
GPU has run it yet, and a product that waits for ever would block the whole device."""


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """The kernel for the prompts of a layer."""

    entry: str
    options: Mapping[str, int]
    """Compile options except VX_DTYPE."""
    tile_tokens: int
    """Query tokens of a tile, at most."""
    spans: bool = True
    """True if it accepts the last position that each token sees."""


def prefill_kernel(
    spec: AttentionSpec, dtype: str, kv: int, arch: str, *, wgmma: bool
) -> PrefillKernel | None:
    """Returns None if no kernel supports this layer on tensor cores: prompts run token by token.

    Args:
        kv: value of VX_KV.
        wgmma: True if paged_prefill_wgmma may be chosen.
    """
    group, size = mma_group(spec.num_heads // spec.num_kv_heads), spec.head_size
    head = {"VX_HEAD": size, "VX_GROUP": group}
    if wgmma and not spec.spans and prefills_by_wgmma(dtype, size, kv, number(arch)):
        tokens = wgmma_tile_tokens(group)
        return PrefillKernel("paged_prefill_wgmma", head, tokens, spans=False)
    keys = prefill_keys(size, number(arch))
    if size % 16 or not keys or not has_tensor_cores(dtype, number(arch)):
        return None
    options = {**head, "VX_KV": kv, "VX_KEYS": keys}
    return PrefillKernel("paged_prefill", options, prefill_tile_tokens(group, size))


@dataclass(frozen=True, slots=True)
class KeyRows:
    """A layer's keys and values in one step."""

    slots: Memory
    """The places where each token's K and V go."""
    table: Memory
    stride: int
    positions: Memory
    """The positions by which a window is cut."""
    context_len: Memory


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as the kernels see it."""

    op: Attention | SegmentAttention
    spec: AttentionSpec
    pages: LayerPages
    kv: int
    """Value of VX_KV."""
    page_shift: int
    rows: Callable[[StepMemory], KeyRows]
    segments: Segments | None

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.spec.reach, self.spec.causal, self.segments, self.spec.spans)


def can_attend(op: Attention | SegmentAttention) -> bool:
    axes = op.spec.rope_axes
    turns = len(axes) <= MAX_FREQUENCIES and max(axes, default=0) < MAX_AXES
    return op.spec.head_size in HEAD_SIZES and turns and op.bias is None


def attention(op: Attention, to: Lowering) -> Enqueue:
    pages = to.pages[op.spec.layer]

    def rows(step: StepMemory) -> KeyRows:
        table = step.block_tables[pages.group]
        slots = step.slots[pages.group]
        return KeyRows(slots, table, step.table_stride, step.positions, step.context_len)

    layer = Layer(op, op.spec, pages, to.kv, to.page_shift, rows, segments=None)
    return _launches(layer, to)


def segment_attention(op: SegmentAttention, to: Lowering) -> Enqueue:
    pages, segments = LayerPages(to.scratch.keys, to.scratch.values), segments_of_op(op)

    def rows(step: StepMemory) -> KeyRows:
        numbers, places, lengths = (step.arrays[array] for array in segment_arrays(segments))
        return KeyRows(numbers, numbers, 1, places, lengths)

    return _launches(Layer(op, op.spec.attention, pages, KV_ELEM, 0, rows, segments), to)


def _launches(layer: Layer, to: Lowering) -> Enqueue:
    """Items first: they write zeros for tokens that have none, and tiles then the answers. Steps
    whose rows have a token each store keys and values in the same launch."""
    store, decode = _store(layer, to), _decode(layer, to)
    whole = _decode(layer, to, stores=True) if _can_store(layer, to) else None
    arch = to.device.info.arch
    kernel = prefill_kernel(layer.spec, to.dtype, layer.kv, arch, wgmma=to.wgmma)
    prefill = _prefill(layer, to, kernel) if kernel else None

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        if whole is not None and sizes.rows == sizes.tokens and not any(sizes.tiles):
            whole(sizes, step)
            return
        store(sizes, step)
        if sizes.items:
            decode(sizes, step)
        if prefill is not None:
            prefill(sizes, step)

    return enqueue


def _can_store(layer: Layer, to: Lowering) -> bool:
    """True if paged_decode_mma can store a token's key and value: one block has both."""
    spec = layer.spec
    group = spec.num_heads // spec.num_kv_heads
    able = decodes_on_tensor_cores(spec, to.dtype, to.device.info.arch)
    own = layer.segments is None and not spec.shared and not spec.spans
    return to.fused and able and own and decode_group(group, spec.head_size) == group


def _vectors(layer: Layer, to: Lowering) -> tuple[Memory | None, Memory | None, Memory | None]:
    """Norms of queries and keys, and the table of rotations."""
    op, axes = layer.op, layer.op.spec.rope_axes
    q_norm, k_norm = (op.q_norm, op.k_norm) if isinstance(op, Attention) else (None, None)
    rope = to.turned(op.rope, axes) if op.rope and axes else to.vector(op.rope)
    return to.vector(q_norm), to.vector(k_norm), rope


def _rope_rows(layer: Layer, step: StepMemory) -> Memory:
    """The row of each token in the table of rotations."""
    return step.arrays[TurnedRows()] if layer.op.spec.rope_axes else step.positions


def _store(layer: Layer, to: Lowering) -> Enqueue:
    spec, pages, qkv = layer.spec, layer.pages, to.place(layer.op.qkv)
    vectors = _vectors(layer, to)
    kernel = to.variant(
        "kv_store", VX_HEAD=spec.head_size, VX_KV=layer.kv, VX_VEC=store_vector(spec.head_size)
    )
    heads = {"heads": spec.num_heads, "kv_heads": 0 if spec.shared else spec.num_kv_heads}
    values = (
        *heads.values(),
        spec.rotary_dim,
        int(spec.interleaved),
        layer.page_shift,
        spec.eps,
    )

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        to.device.launch(
            kernel,
            {"tokens": sizes.tokens, **heads},
            (
                qkv,
                _rope_rows(layer, step),
                layer.rows(step).slots,
                *vectors,
                to.scratch.queries,
                pages.k,
                pages.v,
                pages.k_scales,
                pages.v_scales,
                *values,
            ),
        )

    return enqueue


def _decode(layer: Layer, to: Lowering, *, stores: bool = False) -> Enqueue:
    """
    Args:
        stores: True if it does the work of kv_store, on tensor cores.
    """
    spec, pages, scratch, seen = layer.spec, layer.pages, to.scratch, layer.visibility
    y, sinks = to.place(layer.op.out), _sinks(layer, to)
    head = {"VX_HEAD": spec.head_size, "VX_KV": layer.kv}
    by_mma = decodes_on_tensor_cores(spec, to.dtype, to.device.info.arch)
    if by_mma:
        group = decode_group(spec.num_heads // spec.num_kv_heads, spec.head_size)
        decode = to.variant("paged_decode_mma", **head, VX_GROUP=group, VX_STORE=int(stores))
    else:
        group = group_tile(spec.num_heads // spec.num_kv_heads, spec.head_size)
        options = {**head, "VX_VEC": decode_vector(spec.head_size), "VX_GROUP": group}
        decode, combine = (to.variant(e, **options) for e in ("paged_decode", "paged_combine"))
    q = to.place(layer.op.qkv) if stores else scratch.queries
    vectors = _vectors(layer, to) if stores else (None, None, None)
    turn = (spec.rotary_dim, int(spec.interleaved), spec.eps)
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    # items keep to the window, which reaches back alone where tokens see what comes behind them
    window = 0 if spec.spans else spec.reach
    values = layer.page_shift, window, spec.scale, spec.softcap or 0.0

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        items, first_item, rows = step.items[seen], step.first_item[seen], layer.rows(step)
        joins: tuple[Memory | int | None, ...] = ()
        if by_mma:
            rope_rows = _rope_rows(layer, step) if stores else None
            joins = scratch.arrivals, rope_rows, *vectors, sizes.tokens
        to.device.launch(
            decode,
            {"items": sizes.items, **heads},
            (
                q,
                pages.k,
                pages.v,
                pages.k_scales,
                pages.v_scales,
                items,
                first_item,
                rows.positions,
                rows.table,
                sinks,
                y,
                scratch.partial,
                scratch.weights,
                *joins,
                *heads.values(),
                rows.stride,
                *values,
                *(turn if by_mma else ()),
            ),
        )
        if by_mma:
            return
        to.device.launch(
            combine,
            {"tokens": sizes.tokens, "heads": spec.num_heads},
            (scratch.partial, scratch.weights, first_item, sinks, y, spec.num_heads),
        )

    return enqueue


def _prefill(layer: Layer, to: Lowering, chosen: PrefillKernel) -> Enqueue:
    spec, pages = layer.spec, layer.pages
    y, sinks = to.place(layer.op.out), _sinks(layer, to)
    kernel = to.variant(chosen.entry, **chosen.options)
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    values = (spec.reach, int(spec.causal), spec.scale, spec.softcap or 0.0)
    kind = TileKind(chosen.tile_tokens, layer.segments)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        tiles, rows = step.tiles[kind], layer.rows(step)
        if not tiles.num_bytes:  # prompts of another kind, or none
            return
        seen: tuple[Memory | None, ...] = ()
        if chosen.spans:
            seen = (step.arrays[LastSeen()] if spec.spans else None,)
        to.device.launch(
            kernel,
            {"tiles": tiles.num_bytes // 16, **heads},
            (
                to.scratch.queries,
                pages.k,
                pages.v,
                pages.k_scales,
                pages.v_scales,
                tiles,
                rows.context_len,
                rows.table,
                sinks,
                *seen,
                y,
                *heads.values(),
                rows.stride,
                layer.page_shift,
                *values,
            ),
        )

    return enqueue


def _sinks(layer: Layer, to: Lowering) -> Memory | None:
    return to.vector(layer.op.sinks) if isinstance(layer.op, Attention) else None


def decodes_on_tensor_cores(spec: AttentionSpec, dtype: str, arch: str) -> bool:
    """True if paged_decode_mma supports this layer."""
    return decodes_by_mma(dtype, spec.head_size, number(arch))
