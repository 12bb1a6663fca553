"""`scale`: features times a number."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value


class Scale(ArrayOp):
    """x * factor."""

    name: ClassVar[str] = "scale"
    x: Value
    factor: float
    out: Value

    @classmethod
    def of(cls, x: Value, factor: float) -> Scale:
        expect_rows(x=x)
        return cls(x, factor, Value(x.width, x.rows))

    def check(self) -> None:
        expect(isinstance(self.factor, int | float), f"the factor is {self.factor!r}, no number")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame[self.x] * self.factor
