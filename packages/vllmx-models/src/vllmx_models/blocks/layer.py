"""The interface of a block: common to mixers and feed-forwards.

A block is data that an architecture fills in. It lists its weights and records its ops once for
each layer that uses it; E is the hidden size, T the tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
from vllmx_core.model import Array, CacheSpec, Ops, StateSpec, StepInputs, Weight
from vllmx_core.plan import F32
from vllmx_core.records import Record, field
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.position_bias import Alibi
from vllmx_models.blocks.query_scale import QueryScale
from vllmx_models.blocks.rope import Rope

Shard = Literal["none", "column", "row"]


class LayerNames(Record):
    """The prefixes of the weights of one layer."""

    ours: str
    """Prefix of the logical names: layers.3"""
    theirs: str
    """Prefix of the names in the checkpoint: model.layers.3"""
    hidden_size: int  # E

    def within(self, module: str) -> str:
        """The prefix of a module of the layer; "": the layer itself."""
        return f"{self.theirs}.{module}" if module else self.theirs


class Numbers(Record):
    """A constant vector, as runs of equal numbers: (number, count)."""

    runs: tuple[tuple[float, int], ...]

    def table(self, positions: int) -> F32:
        """The vector, whatever the positions."""
        values, counts = zip(*self.runs, strict=True)
        return np.repeat(np.array(values, np.float32), counts)


class Positions(Record):
    """A learned row for each position."""

    module: str
    rows: int
    first: int = 0
    """The row of position 0."""

    def weights(self, size: int) -> tuple[WeightSpec, ...]:
        table = (PartSpec(f"{self.module}.weight", self.rows),)
        return (WeightSpec("positions", "embedding", table, size, role="vocabulary"),)

    def record(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E)."""
        return ops.embedding(step.positions, w["positions"], self.first)


class LayerScope(Record):
    """The ops, weights and inputs that a block of one layer records with."""

    ops: Ops
    weights: Mapping[str, Weight]
    step: StepInputs
    layer: int
    cache: int
    """Index of the layer's KV cache, if any, in `ModelShape.caches`."""
    state: int
    """Index of the layer's first state, if any, in `ModelShape.states`."""
    tables: Mapping[str, Rope | QueryScale | Alibi | Numbers]
    """RoPEs, query scales, ALiBi and numbers by the names of their tables in `weights`."""
    embedded: Array
    """(T, E) the embeddings of the tokens, as the first layer reads them."""
    spans: bool = False
    """True if attention within an image is bidirectional, see `FeatureSpec.spans`."""
    left: dict[str, Array] = field(default_factory=dict)
    """Values that blocks of earlier layers left to later ones, by name."""
    stream: Array | None = None
    """(T, E) the residual stream at the feed-forward, before its norm."""
    within: str = ""
    """The block's own prefix of logical names, with a dot, where a layer has two alike."""

    def weight(self, name: str) -> Weight:
        """The weight of a logical name without the layer's prefix."""
        return self.weights[f"layers.{self.layer}.{self.within}{name}"]

    def rope(self, rope: Rope | QueryScale | Alibi | Numbers | None) -> Weight | None:
        """The table of a RoPE (cos and sin), of a query scale, of ALiBi, or of numbers."""
        if rope is None:
            return None
        return self.weights[next(name for name, one in self.tables.items() if one == rope)]


class Block(Protocol):
    """Maps the stream, normalised or not, to an update that is added to it."""

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        """The block's lines of the weight map, in the order of use."""
        ...

    def record(self, x: Array, scope: LayerScope) -> Array:
        """(T, E) -> (T, E)."""
        ...


FeedForward = Block
"""A block that treats each token independently."""


class Mixer(Block, Protocol):
    """A block that mixes information across tokens: attention or a recurrence."""

    @property
    def cache(self) -> CacheSpec | None:
        """The cache entry of a token; None: no KV cache."""
        ...

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The recurrent states of a sequence, of constant size."""
        ...

    @property
    def rope(self) -> Rope | None:
        """The RoPE that it uses."""
        ...


def part(module: str, rows: int, bias: bool) -> PartSpec:
    """All rows of a module's matrix and, if `bias`, of its bias."""
    return PartSpec(f"{module}.weight", rows, f"{module}.bias" if bias else None)


def packed_parts(module: str, rows: tuple[int, ...], bias: bool) -> tuple[PartSpec, ...]:
    """The parts of a fused matrix: consecutive blocks of `rows`."""
    name, with_bias = f"{module}.weight", f"{module}.bias" if bias else None
    starts = (sum(rows[:index]) for index in range(len(rows)))
    return tuple(
        PartSpec(name, count, with_bias, runs=RowRuns(start, count, count))
        for start, count in zip(starts, rows, strict=True)
    )


def linear(
    name: str, parts: tuple[PartSpec, ...], cols: int, shard: Shard = "column"
) -> WeightSpec:
    """The spec of a matrix."""
    return WeightSpec(name, "linear", parts, cols, shard)


def transposed(specs: Sequence[WeightSpec]) -> tuple[WeightSpec, ...]:
    """Weights that the checkpoint stores as (input features, output features)."""
    return tuple(
        replace(spec, parts=tuple(replace(one, transposed=True) for one in spec.parts))
        for spec in specs
    )


def vector(name: str, source: str, rows: int, offset: float = 0.0) -> WeightSpec:
    """A norm's weight or bias."""
    return WeightSpec(name, "vector", (PartSpec(source, rows),), offset=offset)


def renamed(spec: WeightSpec, prefix: str, other: str) -> WeightSpec:
    """Adds the names that other checkpoints have as alternatives."""
    return replace(spec, parts=tuple(renamed_part(part, prefix, other) for part in spec.parts))


def renamed_part(part: PartSpec, prefix: str, other: str) -> PartSpec:
    """Adds the alternative prefix to a part."""
    others = tuple(
        one if isinstance(one, str) else renamed_part(one, prefix, other)
        for one in part.alternatives
    )
    if part.name.startswith(prefix):
        others = (other + part.name.removeprefix(prefix), *others)
    return replace(part, alternatives=others)
