"""The values, weights and pages that the ops of one step read and write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import mlx.core as mx
from vllmx_core.ops.values import Frame, WeightRef

from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.matrices import LinearWeight, Matrix
from vllmx_metal.ranks import MetalRanks
from vllmx_metal.recurrent import States, StateStep
from vllmx_metal.step import MetalStep
from vllmx_metal.weights import MetalWeight


class MetalFrame(Frame[mx.array]):
    """The graph of one step while it is built: nothing is computed until it is submitted."""

    def __init__(
        self,
        step: MetalStep,
        weights: Mapping[str, MetalWeight],
        pages: tuple[LayerPages, ...],
        states: tuple[States, ...],
        dtype: mx.Dtype,
    ) -> None:
        super().__init__()
        self.step, self.weights, self.pages, self.dtype = step, weights, pages, dtype
        self.states = states
        self.features: list[mx.array] = []
        """(rows, E) of each part of the store of features; `keep` replaces them."""
        self.ranks: MetalRanks | None = None
        """The other ranks of the model, if it has any."""

    @cached_property
    def state_step(self) -> StateStep:
        """Rows and their slots, made for the first layer that asks."""
        return StateStep.of(self.step.plan)

    def others(self) -> MetalRanks:
        """The other ranks, for an op between ranks."""
        assert self.ranks is not None, "an op between ranks needs ranks"
        return self.ranks

    def array(self, ref: WeightRef) -> mx.array:
        """A vector or a constant."""
        weight = self.weights[ref.name]
        assert isinstance(weight, mx.array), f"{ref.name} is a matrix"
        return weight

    def matrix(self, ref: WeightRef) -> LinearWeight:
        """A matrix with its bias."""
        weight = self.weights[ref.name]
        assert isinstance(weight, LinearWeight), f"{ref.name} is no matrix to multiply"
        return weight

    def table(self, ref: WeightRef) -> Matrix:
        """A table of embeddings."""
        weight = self.weights[ref.name]
        assert not isinstance(weight, LinearWeight | mx.array), f"{ref.name} is no table"
        return weight
