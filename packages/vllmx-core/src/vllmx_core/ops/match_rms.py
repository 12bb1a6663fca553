"""`match_rms`: rows brought to the magnitude of other rows."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value

FLOOR = 1e-5
"""The least mean square by which a row is divided."""


class MatchRms(ArrayOp):
    """x and y (T, F) -> x * sqrt(mean(y^2) / max(mean(x^2), FLOOR))."""

    name: ClassVar[str] = "match_rms"
    x: Value
    y: Value
    out: Value

    @classmethod
    def of(cls, x: Value, y: Value) -> MatchRms:
        expect_rows(x=x, y=y)
        return cls(x, y, Value(x.width, x.rows))

    def check(self) -> None:
        alike = (self.x.width, self.x.rows) == (self.y.width, self.y.rows)
        expect(alike, f"x is {self.x}, y is {self.y}")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = match_rms(frame[self.x], frame[self.y], frame.xp)


def match_rms(x: Array, y: Array, xp: Arrays = NUMPY) -> Array:
    """(T, F), (T, F) -> (T, F)."""
    given, wanted = (xp.square(xp.wide(one)).mean(axis=-1, keepdims=True) for one in (x, y))
    return xp.like(x, xp.wide(x) * xp.sqrt(wanted / xp.maximum(given, given * 0 + FLOOR)))
