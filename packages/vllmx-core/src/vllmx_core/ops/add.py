"""`add`: a sum of two values."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect_rows, expect_same_width
from vllmx_core.ops.values import ArrayFrame, Value


class Add(ArrayOp):
    """x + y."""

    name: ClassVar[str] = "add"
    x: Value
    y: Value
    out: Value

    @classmethod
    def of(cls, x: Value, y: Value) -> Add:
        expect_rows(x=x, y=y)
        return cls(x, y, Value(x.width, x.rows))

    def check(self) -> None:
        expect_same_width(x=self.x, y=self.y)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame[self.x] + frame[self.y]
