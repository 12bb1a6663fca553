"""Operands of the ops' formulas: the values of one step as numpy arrays.

The formulas are written to be read: no fusion, no blocking, one after the other, in the dtype of
the inputs (float32, or float64 in tests that measure the error of float32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.arrays import NUMPY
from vllmx_core.communicator import Communicator, HostRanks
from vllmx_core.ops.values import ArrayFrame, TokenIds, WeightRef
from vllmx_core.plan import I32, AnyArray, StepPlan
from vllmx_core.records import Record

Floats = npt.NDArray[np.floating[Any]]


class Pages(Record):
    """KV cache of one layer; one of latents has rows of one head in `k`, and an empty `v`."""

    k: Floats  # (blocks, P, K, D)
    v: Floats  # (blocks, P, K, D)
    group: int = 0
    """The number of the step's block table that lists its pages."""
    block_size: int = 0
    """Tokens of a page, which may have fewer rows."""


class NumpyWeights(Record):
    """Weights and constants by name, and the biases of those matrices that have one."""

    arrays: Mapping[str, Floats]
    biases: Mapping[str, Floats]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for kind in (self.arrays, self.biases) for array in kind.values())


class NumpyFrame(ArrayFrame[AnyArray]):
    """One step of the reference: its values, weights, plan, KV cache, and the states of recurrent
    layers, (slots, heads, rows, cols) each."""

    def __init__(
        self,
        weights: NumpyWeights,
        plan: StepPlan,
        pages: Sequence[Pages],
        kv_dtype: str | None,
        states: Sequence[Floats] = (),
        features: Sequence[Floats] = (),
        ranks: Communicator | None = None,
    ) -> None:
        self.weights, self.pages, self.kv_dtype, self.states = weights, pages, kv_dtype, states
        ends = None if ranks is None else HostRanks(ranks, _same, _same, self.dtype)
        super().__init__(NUMPY, plan, features, ends)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that the formulas compute in."""
        return next(iter(self.weights.arrays.values())).dtype

    def ids(self, ids: TokenIds) -> AnyArray:
        return numbers(self.plan, ids)

    def vector(self, ref: WeightRef) -> Floats:
        return self.weight(ref)

    def rows(self, ref: WeightRef, ids: AnyArray) -> Floats:
        return self.weight(ref)[ids]

    def upload(self, array: AnyArray) -> AnyArray:
        return array.astype(self.dtype, copy=False) if array.dtype.kind == "f" else array

    def weight(self, ref: WeightRef) -> Floats:
        """A matrix, a vector or a table."""
        return self.weights.arrays[ref.name]

    def bias(self, ref: WeightRef) -> Floats | None:
        """The bias of a matrix, if it has one."""
        return self.weights.biases.get(ref.name)


def _same(x: AnyArray) -> AnyArray:
    return x


def numbers(plan: StepPlan, ids: TokenIds) -> I32:
    """(T,) integers that `ids` stands for."""
    if ids.source == "token_types" and plan.token_types is None:
        return np.zeros(plan.num_tokens, np.int32)
    found: I32 = getattr(plan, ids.source)
    return found


def like(x: Floats, values: Floats) -> Floats:
    """The values in the dtype of x, which scalars and erf may have widened."""
    return values.astype(x.dtype, copy=False)


def state_before(plan: StepPlan, row: int, states: Floats) -> Floats:
    """(heads, rows, cols) that a row begins this step with, out of (slots, heads, rows, cols)."""
    slot = int(plan.state_slots[0][row])
    return np.zeros_like(states[0]) if slot < 0 else states[slot].copy()


def states_after(plan: StepPlan) -> I32:
    """(T,) slots that keep the states after each token, -1 where none does."""
    after = plan.state_after
    return np.full(plan.num_tokens, -1, np.int32) if after is None else after
