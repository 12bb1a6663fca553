"""The interface of a block: common to mixers and feed-forwards.

A block is data that an architecture fills in. It lists its weights and records its ops once for
each layer that uses it; E is the hidden size, T the tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from vllmx_core.model import Array, CacheSpec, Ops, StateSpec, StepInputs, Weight
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

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
    tables: Mapping[str, Rope]
    """The model's RoPEs by the names of their tables in `weights`."""
    embedded: Array
    """(T, E) the embeddings of the tokens, as the first layer reads them."""
    spans: bool = False
    """True if attention within an image is bidirectional, see `FeatureSpec.spans`."""
    stream: Array | None = None
    """(T, E) the residual stream at the feed-forward, before its norm."""

    def weight(self, name: str) -> Weight:
        """The weight of a logical name without the layer's prefix."""
        return self.weights[f"layers.{self.layer}.{name}"]

    def rope(self, rope: Rope | None) -> Weight | None:
        """The cos/sin table of a RoPE."""
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


def vector(name: str, source: str, rows: int, offset: float = 0.0) -> WeightSpec:
    """A norm's weight or bias."""
    return WeightSpec(name, "vector", (PartSpec(source, rows),), offset=offset)
