"""Costs of the segments between two neighbouring cuts: bytes of weights, or measured seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.op import Op
from vllmx_core.recorded.recording import Recording
from vllmx_core.sharding.stage_cuts import Cut, balanced
from vllmx_core.weights.map import parts_of
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

STEP_ROWS = 16
"""Decoding sequences in the step whose cost is estimated."""
_CLEARLY = 0.95
"""A measured cut is used if its slowest stage takes at most this fraction of the time with a cut by
bytes; otherwise noise would decide."""


def byte_costs(recording: Recording, source: WeightSource) -> list[float]:
    """Bytes of weights that each op reads in a step."""
    specs = {spec.name: spec for spec in recording.specs}
    return [_cost(op, specs, source) for op in recording.steps.ops]


def _cost(op: Op, specs: Mapping[str, WeightSpec], source: WeightSource) -> float:
    """Bytes of an op's weights that a step reads: hardly any of a token table, and only the experts
    that its rows use."""
    if isinstance(op, Embedding):
        return 0.0
    size = sum(weight_bytes(specs[ref.name], source) for ref in op.weights if ref.name in specs)
    if isinstance(op, Experts):
        size *= used_share(op.ids.width, op.down.count, STEP_ROWS)
    return size


def used_share(chosen: int, experts: int, rows: int) -> float:
    """Expected fraction of the experts that are used if each row chooses at random."""
    return 1.0 - (1.0 - min(1.0, chosen / experts)) ** rows


def weight_bytes(spec: WeightSpec, source: WeightSource) -> float:
    """Bytes of a weight in the checkpoint, assuming equal matrices in a stack."""
    first = spec.matrices[0]
    cols = max(1, spec.cols)
    parts = parts_of(first, source)
    return spec.count * sum(part.shape[0] * cols * part.layout.bits / 8 for part in parts)


# --- segments -------------------------------------------------------------------------------------
def segment_bounds(cuts: Sequence[Cut]) -> list[tuple[Cut, Cut | None]]:
    """The segments of a step between neighbouring places; the last one has no end."""
    return list(pairwise([Cut(0, ()), *cuts, None]))  # type: ignore[list-item]  # the end alone


def sums_of_stages(
    chosen: Sequence[Cut], cuts: Sequence[Cut], costs: Sequence[float]
) -> list[float]:
    """The cost of each stage, from the costs of the segments."""
    ends = [1 + cuts.index(cut) for cut in chosen]
    return [sum(costs[begin:end]) for begin, end in pairwise([0, *ends, len(costs)])]


def measured_cuts(
    cuts: Sequence[Cut],
    bytes_of_ops: Sequence[float],
    seconds: Sequence[float],
    stages: int,
) -> tuple[Cut, ...]:
    """The places at which the slowest stage is fastest. Places that balance bytes of weights are
    preferred if they are hardly slower, so that repeated measurements give the same result.

    Args:
        cuts: all places.
        bytes_of_ops: see `byte_costs`.
        seconds: of each segment.
    """
    costs = [0.0] * len(bytes_of_ops)
    for (begin, _), cost in zip(segment_bounds(cuts), seconds, strict=True):
        costs[begin.index] = cost
    by_bytes, by_time = (balanced(cuts, one, stages) for one in (bytes_of_ops, costs))
    before, after = (max(sums_of_stages(one, cuts, seconds)) for one in (by_bytes, by_time))
    return by_time if after < _CLEARLY * before else by_bytes


def likeness(
    ops: Sequence[Op], specs: Mapping[str, WeightSpec], source: WeightSource
) -> tuple[object, ...]:
    """Equal for segments that take the same time: ops of the same sizes, options and formats."""

    def size(name: str) -> float | None:
        return weight_bytes(specs[name], source) if name in specs else None

    return tuple(
        (
            op.name,
            tuple((one.width, one.rows, one.dtype) for one in (*op.reads, *op.writes)),
            tuple((ref.kind, ref.rows, ref.cols, ref.count, size(ref.name)) for ref in op.weights),
            repr(op.options),
        )
        for op in ops
    )
