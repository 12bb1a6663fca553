"""Values that a model passes from op to op while its step is recorded: names, not arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from vllmx_core.arrays import Arrays
from vllmx_core.communicator import ArrayRanks
from vllmx_core.errors import OpError
from vllmx_core.plan import AnyArray, StepPlan
from vllmx_core.records import Record, field

Rows = Literal["T", "L"]
"""The number of rows of an array: all tokens of the step, or those that want logits."""
Output = Literal["tokens", "vectors", "token_vectors", "sparse_vectors", "scores"]
"""The result of a step: logits to sample from, or a vector or scores for each text."""
ValueType = Literal["model", "f32", "i32"]
WeightKind = Literal["linear", "embedding", "vector", "stack", "constant"]
A = TypeVar("A")


class Value(Record, eq=False):
    """An array (rows, width) of the step; identity is what tells two apart."""

    width: int
    rows: Rows = "T"
    dtype: ValueType = "model"
    """"model": the type that the backend computes in."""
    below: int = 0
    """The bound of an i32 value's numbers: they are 0 to below - 1."""

    def __bool__(self) -> bool:
        raise OpError("the forward pass branches on a value: it must only pass arrays on")

    def __iter__(self) -> Iterator[object]:
        raise OpError("the forward pass iterates over an array: it must only pass arrays on")


class WeightRef(Record):
    """A weight or a constant as a model sees it: its name and what the weight map says of it."""

    name: str
    kind: WeightKind
    rows: int
    cols: int = 0
    """0 for a vector."""
    count: int = 1
    """Matrices of a stack, each (rows, cols)."""


IdSource = Literal["tokens", "positions", "token_types"]


class TokenIds(Record):
    """Stands for a number of each token of the step (T,): its id, its position or its type; only
    `embedding` takes it."""

    source: IdSource = "tokens"


class LogitRows(Record):
    """Stands for the (L,) indices of the tokens that want logits; `logits` and `pool` take it."""


class StepInputs(Record):
    """The inputs of the step that is being recorded."""

    tokens: TokenIds = field(default_factory=TokenIds)
    positions: TokenIds = field(default_factory=lambda: TokenIds("positions"))
    token_types: TokenIds = field(default_factory=lambda: TokenIds("token_types"))
    logit_rows: LogitRows = field(default_factory=LogitRows)


class Frame(Generic[A]):
    """The values of one step, as whatever arrays a backend has. A subclass adds what its ops need:
    weights, KV cache, the plan."""

    def __init__(self) -> None:
        self._values: dict[Value, A] = {}

    def __getitem__(self, value: Value) -> A:
        return self._values[value]

    def __setitem__(self, value: Value, array: A) -> None:
        self._values[value] = array

    def drop(self, value: Value) -> None:
        """Lets go of an array that nobody reads any more."""
        del self._values[value]


class ArrayFrame(Frame[A], ABC):
    """The values of one step, and what formulas over `xp` need of it. A backend adds to it what
    its own handlers need.

    Args:
        features: (rows, E) of each part of the store of features.
        ranks: the other ranks of the model, if it has any.

    Attributes:
        adapters: the `vllmx_core.adapters.Pieces` of the adapter in each slot.
    """

    def __init__(
        self,
        xp: Arrays,
        plan: StepPlan,
        features: Sequence[A] = (),
        ranks: ArrayRanks[A] | None = None,
    ) -> None:
        super().__init__()
        self.xp, self.plan, self.features, self._ranks = xp, plan, features, ranks
        self.adapters: Mapping[int, Mapping[str, Sequence[Any]]] = {}
        self._adapted: dict[Rows, list[tuple[int, A]]] = {}

    @property
    def ranks(self) -> ArrayRanks[A]:
        """The other ranks, for an op between ranks."""
        assert self._ranks is not None, "an op between ranks needs a communicator"
        return self._ranks

    @abstractmethod
    def ids(self, ids: TokenIds) -> A:
        """(T,) integers that `ids` stands for."""

    @abstractmethod
    def vector(self, ref: WeightRef) -> A:
        """A vector or a constant."""

    @abstractmethod
    def rows(self, ref: WeightRef, ids: A) -> A:
        """(N,) -> (N, E) rows of a table, in the type of `Arrays.wide`."""

    @abstractmethod
    def upload(self, array: AnyArray) -> A:
        """An array of the host where the step computes: floats in the type of `Arrays.wide`."""

    def adapted_rows(self, rows: Rows) -> list[tuple[int, A]]:
        """The slots that the step's rows name, each with the indices of its tokens, or of those
        that want logits; made for the first op that asks."""
        if rows not in self._adapted:
            slots = self.plan.adapted if rows == "T" else self.plan.adapted[self.plan.logit_rows]
            self._adapted[rows] = [
                (slot, self.upload(np.flatnonzero(slots == slot)))
                for slot in np.unique(slots[slots >= 0]).tolist()
            ]
        return self._adapted[rows]

    def optional(self, ref: WeightRef | None) -> A | None:
        """A vector that the op may have."""
        return None if ref is None else self.vector(ref)
