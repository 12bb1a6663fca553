"""The values, weights and pages that the ops of one step read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
from vllmx_core.ops.values import ArrayFrame, TokenIds, WeightRef
from vllmx_core.plan import AnyArray

from vllmx_metal.arrays import METAL
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.matrices import LinearWeight, Matrix
from vllmx_metal.ranks import MetalRanks
from vllmx_metal.recurrent import States, StateStep
from vllmx_metal.step import MetalStep
from vllmx_metal.weights import MetalWeight


class MetalFrame(ArrayFrame[mx.array]):
    """The graph of one step while it is built: nothing is computed until it is submitted."""

    def __init__(
        self,
        step: MetalStep,
        weights: Mapping[str, MetalWeight],
        pages: tuple[LayerPages, ...],
        states: tuple[States, ...],
        dtype: mx.Dtype,
        features: Sequence[mx.array] = (),
        ranks: MetalRanks | None = None,
    ) -> None:
        super().__init__(METAL, step.plan, features, ranks)
        self.step, self.weights, self.pages, self.dtype = step, weights, pages, dtype
        self.states = states

    @cached_property
    def state_step(self) -> StateStep:
        """Rows and their slots, made for the first layer that asks."""
        return StateStep.of(self.step.plan)

    def ids(self, ids: TokenIds) -> mx.array:
        found: mx.array = getattr(self.step, ids.source)
        return found

    def rows(self, ref: WeightRef, ids: mx.array) -> mx.array:
        if ref.kind == "constant":
            return self.vector(ref)[ids]
        return self.table(ref).rows(ids).astype(mx.float32)

    def upload(self, array: AnyArray) -> mx.array:
        return mx.array(np.ascontiguousarray(array))

    def vector(self, ref: WeightRef) -> mx.array:
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
