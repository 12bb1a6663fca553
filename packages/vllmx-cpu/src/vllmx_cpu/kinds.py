"""Which parts of a checkpoint stay in their quantised type, and where fused matrices are cut."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from vllmx_core.weights import WeightSource, WeightSpec

from vllmx_cpu.structs import BLOCK_KINDS


def block_kind(spec: WeightSpec, source: WeightSource) -> str | None:
    """The GGUF type that all parts have in common, if the kernels multiply it."""
    kinds = {_part_kind(source, part.name) for part in spec.parts}
    return kinds.pop() if len(kinds) == 1 and spec.offset == 0.0 else None


def segments(
    spec: WeightSpec, source: WeightSource, gated: Collection[str]
) -> tuple[WeightSpec, ...]:
    """A matrix to multiply whose parts have different types (q and k in one, v in a finer one) as
    several, one below the other, each of one type; any other spec as it is."""
    if spec.kind != "linear" or spec.name in gated:
        return (spec,)
    runs = [tuple(run) for _, run in groupby(spec.parts, lambda p: _part_kind(source, p.name))]
    if len(runs) == 1:
        return (spec,)
    return tuple(
        replace(spec, name=f"{spec.name}[{index}]", parts=run) for index, run in enumerate(runs)
    )


def _part_kind(source: WeightSource, name: str) -> str | None:
    layout = source.part(name).layout
    kind = str(layout.options.get("type")) if layout.kind == "gguf" else None
    return kind if kind in BLOCK_KINDS else None
