"""What a model passes from op to op while its step is recorded: names of arrays, not arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from vllmx_core.errors import OpError

Rows = Literal["T", "L"]
"""How many rows an array has: the tokens of the step, or those that want logits."""
WeightKind = Literal["linear", "embedding", "vector", "stack", "constant"]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array (rows, width) of the step; identity is what tells two apart. Logits (rows L) are
    float32, the others of the type that the backend computes in."""

    width: int
    rows: Rows = "T"

    def __bool__(self) -> bool:
        raise OpError("the forward pass branches on a value: it must only pass arrays on")

    def __iter__(self) -> Iterator[object]:
        raise OpError("the forward pass iterates over an array: it must only pass arrays on")


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A weight or a constant as a model sees it: its name and what the weight map says of it."""

    name: str
    kind: WeightKind
    rows: int
    cols: int = 0
    """0 for a vector."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Stands for the (T,) token ids of the step; only `embedding` takes it."""


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Stands for the (L,) indices of the tokens that want logits; only `logits` takes it."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the step that is being recorded."""

    tokens: TokenIds = field(default_factory=TokenIds)
    logit_rows: LogitRows = field(default_factory=LogitRows)
