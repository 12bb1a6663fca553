"""`slice`: some neighbouring features."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value


class Slice(ArrayOp):
    """The features of x from `first` on, as many as `out` has. `vllmx_core.sharding.parts` puts it
    before products with some columns of a matrix; models do not write it."""

    name: ClassVar[str] = "slice"
    x: Value
    first: int
    out: Value

    @classmethod
    def of(cls, x: Value, first: int, width: int) -> Slice:
        expect_rows(x=x)
        return cls(x, first, Value(width, x.rows))

    def check(self) -> None:
        end = self.first + self.out.width
        expect(
            0 <= self.first < end <= self.x.width, f"{end} is beyond the {self.x.width} features"
        )

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame[self.x][:, self.first : self.first + self.out.width]
