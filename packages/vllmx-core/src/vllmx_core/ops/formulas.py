"""Operands of the ops' formulas: the values of one step as numpy arrays.

The formulas are written to be read: no fusion, no blocking, one after the other, in the dtype of
the inputs (float32, or float64 in tests that measure the error of float32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.communicator import Communicator
from vllmx_core.ops.values import Frame, WeightRef
from vllmx_core.plan import AnyArray, StepPlan
from vllmx_core.records import Record

Floats = npt.NDArray[np.floating[Any]]


class Pages(Record):
    """KV cache of one layer; one of latents has rows of one head in `k`, and an empty `v`."""

    k: Floats  # (blocks, P, K, D)
    v: Floats  # (blocks, P, K, D)
    group: int = 0
    """The number of the step's block table that lists its pages."""


class NumpyWeights(Record):
    """Weights and constants by name, and the biases of those matrices that have one."""

    arrays: Mapping[str, Floats]
    biases: Mapping[str, Floats]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for kind in (self.arrays, self.biases) for array in kind.values())


class NumpyFrame(Frame[AnyArray]):
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
        super().__init__()
        self._ranks = ranks
        self.weights, self.plan, self.pages, self.kv_dtype = weights, plan, pages, kv_dtype
        self.states = states
        self.features = features
        """(rows, E) of each part of the store of features."""

    @property
    def ranks(self) -> Communicator:
        """The other ranks of a model that is one of several."""
        assert self._ranks is not None, "an op between ranks needs a communicator"
        return self._ranks

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that the formulas compute in."""
        return next(iter(self.weights.arrays.values())).dtype

    def weight(self, ref: WeightRef) -> Floats:
        """A matrix, a vector or a table."""
        return self.weights.arrays[ref.name]

    def bias(self, ref: WeightRef) -> Floats | None:
        """The bias of a matrix, if it has one."""
        return self.weights.biases.get(ref.name)


def like(x: Floats, values: Floats) -> Floats:
    """The values in the dtype of x, which scalars and erf may have widened."""
    return values.astype(x.dtype, copy=False)


def state_before(plan: StepPlan, row: int, states: Floats) -> Floats:
    """(heads, rows, cols) that a row begins this step with, out of (slots, heads, rows, cols)."""
    slot = int(plan.state_slots[0][row])
    return np.zeros_like(states[0]) if slot < 0 else states[slot].copy()
