"""Places a step's arrays in memory, once, for the largest step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.attention import Attention, AttentionSpec
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.head import Head
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.latent_attention import LatentAttention, LatentSpec
from vllmx_core.ops.op import Op, OpList, last_reads
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import Rows, Value
from vllmx_core.ops.vocab_embedding import VocabEmbedding
from vllmx_core.recorded.arena import ArenaPlan, plan_arena

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.kernel_specs.attention import KV_ELEM, mma_group
from vllmx_cuda.kernel_specs.linear import MMA_OUTPUTS
from vllmx_cuda.kernel_specs.types import FUSED_TOKENS, ceil_div
from vllmx_cuda.matrices.form import ProductScratch, ScratchBytes
from vllmx_cuda.program import latent_ops
from vllmx_cuda.program.attention_ops import prefill_kernel
from vllmx_cuda.program.expert_ops import Spaces
from vllmx_cuda.program.fused_ops import NormedProduct, parts_of
from vllmx_cuda.program.indexer_ops import SCORED_TOKENS, stride_of
from vllmx_cuda.program.lowering import Rotation, Scratch
from vllmx_cuda.program.rank_ops import combined_bytes
from vllmx_cuda.program.step_arrays import Segments, arrays_of, segments_of_op
from vllmx_cuda.program.work import TileKind, Visibility, WorkKinds, item_capacity

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Offsets of all values in the arena, sums that take over the residual that they are added to,
    and the bytes of `Scratch` and `ProductScratch`."""

    arena: ArenaPlan
    in_place: Mapping[Value, Value]
    queries: int
    partial: int
    weights: int
    rows: int
    found: int
    keys: int
    experts: int
    turned: int
    own_ids: int
    scores: int
    gathered: int
    squares: int
    arrivals: int
    products: ScratchBytes

    @property
    def num_bytes(self) -> int:
        return self.arena.num_bytes + sum(self._scratch) + self.products.num_bytes

    @property
    def _scratch(self) -> tuple[int, ...]:
        return (
            self.queries,
            self.partial,
            self.weights,
            self.rows,
            self.found,
            self.keys,
            self.keys,
            self.experts,
            self.turned,
            self.own_ids,
            self.scores,
            self.gathered,
            self.squares,
            self.arrivals,
        )

    def scratch(self, device: Device) -> Scratch:
        *others, arrivals = self._scratch
        return Scratch(*[*map(device.empty, others), device.zeros(arrivals)])

    def product_scratch(self, device: Device) -> ProductScratch:
        need = self.products
        codes, scales, work = map(device.empty, (need.codes, need.scales, need.work))
        return ProductScratch(codes, scales, work, device.zeros(need.counters))


def lay_out(
    steps: OpList,
    max_rows: Mapping[Rows, int],
    dtype: str,
    num_processors: int,
    products: ScratchBytes,
) -> StepLayout:
    ops, item = steps.ops, ITEM_BYTES[dtype]
    in_place = _in_place(ops)

    def value_bytes(value: Value) -> int:
        return value.width * max_rows[value.rows] * (item if value.dtype == "model" else 4)

    def gathered(op: Op) -> int:
        if isinstance(op, Combine):
            return combined_bytes(op, max_rows["T"], item)
        return value_bytes(op.out) if isinstance(op, AllGather) else 0

    specs, latents = attention_specs(ops), latent_specs(ops)
    items = max_items(ops, max_rows["T"], num_processors)
    widest = max((spec.num_heads * spec.head_size for spec in specs), default=0)
    found = max((spec.num_heads * spec.rank for spec in latents), default=0)
    rows = max((spec.num_heads * spec.row_size for spec in latents), default=0)
    indexers = [op for op in ops if isinstance(op, Indexer)]
    index = max((op.q.width for op in indexers), default=0)
    head_counts = [*(spec.num_heads for spec in specs), *(spec.num_heads for spec in latents)]
    heads = max(head_counts, default=0)
    kept = (op.spec for op in ops if isinstance(op, SegmentAttention))
    residuals = [op.norm.total.width for op in ops if isinstance(op, NormedProduct)]
    head_inputs = [op.x.width for op in ops if isinstance(op, Head)]
    return StepLayout(
        plan_arena(ops, value_bytes, [steps.logits], alignment=ALIGNMENT, in_place=in_place),
        in_place,
        queries=max_rows["T"] * max(widest, rows, index) * item,
        partial=items * max(widest, found) * 4,
        weights=items * heads * 2 * 4,
        rows=max_rows["L"] * max(head_inputs, default=0) * item,
        found=max_rows["T"] * found * item,
        keys=max_rows["T"] * max((s.num_kv_heads * s.head_size for s in kept), default=0) * item,
        experts=max(
            (Spaces.of(op, max_rows["T"], item).num_bytes for op in ops if isinstance(op, Experts)),
            default=0,
        ),
        turned=sum(_turned_bytes(max_rows["T"], axes) for _, axes in rotations(ops)),
        own_ids=4 * max_rows["T"] * any(isinstance(op, VocabEmbedding) for op in ops),
        scores=max((4 * SCORED_TOKENS * stride_of(op) for op in indexers), default=0),
        gathered=max((gathered(op) for op in ops), default=0),
        squares=4 * FUSED_TOKENS * ceil_div(max(residuals, default=0), MMA_OUTPUTS),
        arrivals=4 * max_rows["T"] * max((spec.num_heads for spec in specs), default=0),
        products=products,
    )


def rotations(ops: Sequence[Op]) -> tuple[Rotation, ...]:
    """Rotations with axes, which layers share."""
    return tuple(
        dict.fromkeys(
            (op.rope, op.spec.rope_axes)
            for op in ops
            if isinstance(op, Attention | SegmentAttention) and op.rope and op.spec.rope_axes
        )
    )


def place_turned(turned: Memory, ops: Sequence[Op], max_tokens: int) -> Mapping[Rotation, Memory]:
    """The memory for the rows of each rotation."""
    found: dict[Rotation, Memory] = {}
    begin = 0
    for rotation in rotations(ops):
        size = _turned_bytes(max_tokens, rotation[1])
        found[rotation] = turned.at(begin, size)
        begin += size
    return found


def _turned_bytes(max_tokens: int, axes: tuple[int, ...]) -> int:
    return -(-4 * max_tokens * 2 * len(axes) // ALIGNMENT) * ALIGNMENT


def _in_place(ops: Sequence[Op]) -> dict[Value, Value]:
    """Sum -> residual, where nothing reads the residual afterwards."""
    last = last_reads(ops)
    return {
        op.total: op.residual
        for index, joined in enumerate(ops)
        for op in parts_of(joined)
        if isinstance(op, AddRmsNorm) and op.x is not op.residual and last[op.residual] == index
    }


def attention_specs(ops: Sequence[Op]) -> list[AttentionSpec]:
    """The attention of all ops that have some, with and without pages."""
    return [seen.spec for seen in _attention(ops)]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The properties of a layer that decide its attention work."""

    spec: AttentionSpec
    segments: Segments | None

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.spec.reach, self.spec.causal, self.segments, self.spec.spans)


def _attention(ops: Sequence[Op]) -> list[_Seen]:
    found = []
    for op in ops:
        if isinstance(op, Attention):
            found.append(_Seen(op.spec, segments=None))
        elif isinstance(op, SegmentAttention):
            found.append(_Seen(op.spec.attention, segments_of_op(op)))
    return found


def latent_specs(ops: Sequence[Op]) -> list[LatentSpec]:
    return [op.spec for op in ops if isinstance(op, LatentAttention)]


def work_kinds(
    ops: Sequence[Op], dtype: str, kv: int, arch: str, *, wgmma: bool = False
) -> WorkKinds:
    """Returns the kinds of attention work in a step. Prompts run on tensor cores if every layer
    supports it. For `kv` and `wgmma` see `prefill_kernel`."""
    layers, latents = _attention(ops), [latent_ops.VISIBILITY for _ in latent_specs(ops)]
    tiles: dict[TileKind, None] = {}
    by_tiles = not latents
    for one in layers:
        pages = KV_ELEM if one.segments else kv
        kernel = prefill_kernel(one.spec, dtype, pages, arch, wgmma=wgmma)
        by_tiles = by_tiles and kernel is not None
        if kernel:
            tiles[TileKind(kernel.tile_tokens, one.segments)] = None
    seen = tuple(dict.fromkeys([*(one.visibility for one in layers), *latents]))
    return WorkKinds(seen, tuple(tiles) if by_tiles else (), arrays_of(ops))


def max_items(ops: Sequence[Op], num_tokens: int, num_processors: int) -> int:
    """Work items that a step of so many tokens can have in any layer."""
    blocks = [
        *map(blocks_an_item, attention_specs(ops)),
        *map(latent_ops.blocks_an_item, latent_specs(ops)),
    ]
    return max(
        (item_capacity(num_tokens, num_processors, count) for count in blocks), default=num_tokens
    )


def blocks_an_item(spec: AttentionSpec) -> int:
    """The least second dimension that a grid of decoding has for this layer."""
    return spec.num_heads // mma_group(spec.num_heads // spec.num_kv_heads)
