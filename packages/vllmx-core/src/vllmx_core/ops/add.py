"""`add`: a sum of two values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect_rows, expect_same_width
from vllmx_core.ops.values import Value

if TYPE_CHECKING:
    from vllmx_core.ops.recorder import Ops


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

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield Case.between(
            "both inputs are kept", 24, _inputs_kept, lambda b: b.linear("square", 24, 24)
        )


def _inputs_kept(ops: Ops, w: Weights, x: Value) -> Value:
    y = ops.linear(x, w["square"])
    total = ops.add(x, y)
    return ops.add(ops.scale(total, -0.75), ops.add(y, ops.scale(x, 0.5)))
