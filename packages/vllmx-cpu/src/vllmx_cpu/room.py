"""The memory of a pass over recorded ops, without weights and caches."""

from __future__ import annotations

from collections.abc import Mapping

from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.downsample import Downsample
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.grouped_linear import GroupedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import OpList
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import Rows
from vllmx_core.recorded.arena import ArenaPlan, plan_arena
from vllmx_core.records import Record

from vllmx_cpu.adapters import CpuAdapters
from vllmx_cpu.lowering.attention import INDEXER_TOKENS, score_stride, segment_dtype
from vllmx_cpu.lowering.compressed import GROUPED_TOKENS, grouped_numbers
from vllmx_cpu.lowering.images import downsampled_numbers
from vllmx_cpu.native import library
from vllmx_cpu.packing import MatrixShape
from vllmx_cpu.structs import KV_DTYPES, WEIGHT_KINDS


class Extent(Record):
    """The largest pass."""

    max_rows: Mapping[Rows, int]
    """T and L."""
    num_rows: int
    """Sequences, or images of a tower."""
    longest: int
    """Tokens of one of them that others attend to."""
    num_windows: int = 0
    """The number of windows of a pass's images."""


class Room(Record):
    """The memory that a pass over recorded ops takes."""

    arena: ArenaPlan
    panel_bytes: int
    workspace_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.arena.num_bytes + self.panel_bytes + self.workspace_bytes


def plan_room(
    steps: OpList,
    extent: Extent,
    shapes: Mapping[str, MatrixShape],
    num_threads: int,
    kv_dtype: str,
    adapters: CpuAdapters | None = None,
) -> Room:
    """Sizes everything that the ops work in."""
    adapted = {op.out: op.y for op in steps.ops if isinstance(op, Adapt)}
    arena = plan_arena(
        steps.ops,
        lambda value: value.width * extent.max_rows[value.rows] * 4,
        [steps.logits],
        in_place=adapted,
    )
    return Room(
        arena,
        _panel_bytes(steps, extent.max_rows, shapes),
        _workspace_bytes(steps, extent, num_threads, kv_dtype, adapters),
    )


def _panel_bytes(
    steps: OpList, max_rows: Mapping[Rows, int], shapes: Mapping[str, MatrixShape]
) -> int:
    """Four bytes a column and fewer, in whole units; experts have many rows and a closer bound."""
    largest = 0
    for op in steps.ops:
        if isinstance(op, Linear | GatedLinear | Head):
            largest = max(largest, max_rows[op.out.rows] * (op.x.width // 256 + 1) * 1024)
        elif isinstance(op, Experts):
            rows = max_rows["T"] * op.ids.width
            of_stacks = (
                library().vx_panels_bytes(WEIGHT_KINDS[shape.kind], shape.cols, rows)
                for shape in (shapes[op.gate_up.name], shapes[op.down.name])
            )
            largest = max(largest, *of_stacks)
        elif isinstance(op, GroupedLinear):
            shape, rows = shapes[op.w.name], op.w.count * min(max_rows["T"], GROUPED_TOKENS)
            kind = WEIGHT_KINDS[shape.kind]
            largest = max(largest, library().vx_panels_bytes(kind, shape.cols, rows))
        elif isinstance(op, Downsample):
            for (times, bins), w in zip(op.sizes[1:], op.matrices, strict=True):
                kind = WEIGHT_KINDS[shapes[w.name].kind]
                needed = library().vx_panels_bytes(kind, shapes[w.name].cols, times * bins)
                largest = max(largest, needed)
        elif isinstance(op, LatentAttention):
            rows = library().vx_latent_rows(op.spec.num_heads, max_rows["T"])
            of_heads = (
                library().vx_panels_bytes(WEIGHT_KINDS[shape.kind], shape.cols, rows)
                for shape in (shapes[op.k_b.name], shapes[op.v_b.name])
            )
            largest = max(largest, *of_heads)
    return largest


def _workspace_bytes(
    steps: OpList,
    extent: Extent,
    num_threads: int,
    kv_dtype: str,
    adapters: CpuAdapters | None,
) -> int:
    largest, max_tokens = 0, extent.max_rows["T"]
    for op in steps.ops:
        if isinstance(op, Attention):
            spec = op.spec
            needed = library().vx_attention_workspace_bytes(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                extent.longest,
                num_threads,
            )
        elif isinstance(op, LatentAttention):
            latent = op.spec
            needed = library().vx_latent_workspace_bytes(
                latent.num_heads,
                latent.rank,
                latent.nope_size,
                latent.value_size,
                0 if op.picked is None else op.picked.width,
                extent.longest,
                num_threads,
            )
        elif isinstance(op, CompressedAttention):
            needed = 4 * max_tokens * op.spec.head_size
        elif isinstance(op, GroupedLinear):
            needed = 4 * grouped_numbers(op)
        elif isinstance(op, Downsample):
            needed = 4 * downsampled_numbers(op)
        elif isinstance(op, Indexer):
            needed = 4 * INDEXER_TOKENS * score_stride(op)
        elif isinstance(op, SegmentAttention):
            rows = extent.num_windows if op.spec.windowed else extent.num_rows
            needed = library().vx_segment_workspace_bytes(
                op.spec.num_kv_heads,
                op.spec.head_size,
                max_tokens,
                rows,
                extent.longest,
                KV_DTYPES[segment_dtype(kv_dtype)],
            )
        elif isinstance(op, Experts):
            needed = library().vx_experts_workspace_bytes(
                max_tokens, op.ids.width, op.inner, op.x.width, op.gate_up.count, num_threads
            )
        elif isinstance(op, Adapt) and adapters is not None:
            needed = 4 * extent.max_rows[op.y.rows] * adapters.shrunk_numbers(op.w.name)
        else:
            continue
        largest = max(largest, int(needed))
    return largest
