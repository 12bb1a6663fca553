"""`add`: a sum of two values."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect_rows, expect_same_width
from vllmx_core.ops.values import Value


class Add(Op):
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

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = frame[self.x] + frame[self.y]
