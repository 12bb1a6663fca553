"""The values, weights and pages that the ops of one step read and write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor
from vllmx_core.communicator import RowRanks
from vllmx_core.ops.values import ArrayFrame, TokenIds, WeightRef
from vllmx_core.plan import AnyArray

from vllmx_torch.arrays import TORCH
from vllmx_torch.attention import Scratch
from vllmx_torch.foreign.op import FOREIGN_MODULE, ForeignModule
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.recurrent import StateStep
from vllmx_torch.step import TorchStep
from vllmx_torch.weights import LinearWeight, TorchWeight


class TorchFrame(ArrayFrame[Tensor]):
    """One step: its values, plan, weights, KV cache, and the states of recurrent layers, (slots,
    heads, rows, cols) each."""

    def __init__(
        self,
        step: TorchStep,
        weights: Mapping[str, TorchWeight | ForeignModule],
        pages: tuple[LayerPages, ...],
        states: tuple[Tensor, ...],
        scratch: Scratch,
        features: tuple[Tensor, ...] = (),
        ranks: RowRanks[Tensor] | None = None,
    ) -> None:
        super().__init__(TORCH, step.plan, features, ranks)
        self.step, self.weights, self.pages, self.scratch = step, weights, pages, scratch
        self.states = states

    @cached_property
    def state_step(self) -> StateStep:
        """Rows and their slots, made for the first layer that asks."""
        return StateStep.of(self.step)

    def ids(self, ids: TokenIds) -> Tensor:
        """See `ArrayFrame.ids`."""
        found: Tensor = getattr(self.step, ids.source)
        return found

    def rows(self, ref: WeightRef, ids: Tensor) -> Tensor:
        """See `ArrayFrame.rows`."""
        return self.vector(ref)[ids].float()

    def upload(self, array: AnyArray) -> Tensor:
        """See `ArrayFrame.upload`."""
        return TORCH.upload(self.step.tokens, array)

    def vector(self, ref: WeightRef) -> Tensor:
        """A table, a vector or a constant."""
        weight = self.weights[ref.name]
        assert isinstance(weight, Tensor), f"{ref.name} is a matrix"
        return weight

    def module(self) -> ForeignModule:
        """The module that runs the whole step, in place of ops."""
        weight = self.weights[FOREIGN_MODULE]
        assert isinstance(weight, ForeignModule), "the weights are those of ops"
        return weight

    def matrix(self, ref: WeightRef) -> LinearWeight:
        """A matrix, or a stack of such, with its bias."""
        weight = self.weights[ref.name]
        assert isinstance(weight, LinearWeight), f"{ref.name} is no matrix"
        return weight
