"""Attention and Mamba-2 side by side in one layer, as in Falcon-H1."""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.model import Array, KVSpec, SharedKV, StateSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import LayerNames, LayerScope, Numbers
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.rope import Rope


class ParallelMixer(Record):
    """The sum of both, which read the same input; each has a factor before it and one behind."""

    attention: AttentionMixer
    mamba: MambaMixer
    attention_factors: tuple[float, float] = (1.0, 1.0)
    mamba_factors: tuple[float, float] = (1.0, 1.0)

    @property
    def cache(self) -> KVSpec | SharedKV | None:
        return self.attention.cache

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self.mamba.states

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """The constants of both."""
        return (*self.attention.numbers, *self.mamba.numbers)

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        inner = replace(names, ours=f"{names.ours}.mamba")
        return (*self.attention.weights(names), *self.mamba.weights(inner))

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops

        def scaled(x: Array, factor: float) -> Array:
            return x if factor == 1.0 else ops.scale(x, factor)

        before, behind = self.attention_factors
        attended = scaled(self.attention.record(scaled(x, before), scope), behind)
        before, behind = self.mamba_factors
        inner = replace(scope, within="mamba.")
        return ops.add(attended, scaled(self.mamba.record(scaled(x, before), inner), behind))
