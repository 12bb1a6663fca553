"""`add_rms_norm`: the residual stream goes on, and its norm goes into the next block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from vllmx_core.ops.add import Add
from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_rows, expect_same_width, expect_vector
from vllmx_core.ops.rms_norm import RmsNorm, rms_norm
from vllmx_core.ops.values import Value, WeightRef

if TYPE_CHECKING:
    from vllmx_core.ops.recorder import Ops


class AddRmsNorm(Op):
    """total = x + residual, out = rms_norm(total)."""

    name: ClassVar[str] = "add_rms_norm"
    results: ClassVar[tuple[str, ...]] = ("out", "total")
    x: Value
    residual: Value
    w: WeightRef
    eps: float
    out: Value
    total: Value

    @classmethod
    def of(cls, x: Value, residual: Value, w: WeightRef, eps: float) -> AddRmsNorm:
        expect_rows(x=x, residual=residual)
        normed, total = Value(x.width, x.rows), Value(x.width, x.rows)
        return cls(x, residual, w, eps, normed, total)

    def check(self) -> None:
        expect_same_width(x=self.x, residual=self.residual)
        expect_vector(self.w, self.x.width)
        expect(self.eps > 0, f"eps is {self.eps}, it must be above 0")

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out], frame[self.total] = add_rms_norm(
            frame[self.x], frame[self.residual], frame.weight(self.w), self.eps
        )

    def expand(self) -> tuple[Op, ...]:
        return (
            Add(self.x, self.residual, self.total),
            RmsNorm(self.total, self.w, self.eps, self.out),
        )

    @classmethod
    def cases(cls) -> Iterator[Case]:
        return (_case(width, offset) for width in (16, 33, 130) for offset in (0.0, 1.0))


def _case(width: int, offset: float) -> Case:
    return Case.between(
        f"width {width}, offset {offset}",
        width,
        _both_results,
        lambda b: [b.vector(name, width, offset) for name in "abc"],
    )


def _both_results(ops: Ops, w: Weights, x: Value) -> Value:
    first, total = ops.add_rms_norm(ops.rms_norm(x, w["a"], 0.3), None, w["b"], 0.1)
    second, total = ops.add_rms_norm(first, total, w["c"], 1e-6)
    return ops.add(second, total)


def add_rms_norm(
    x: Floats, residual: Floats | None, w: Floats, eps: float
) -> tuple[Floats, Floats]:
    """(normalised sum, sum); the sum of x alone is x itself."""
    total = x if residual is None else x + residual
    return rms_norm(total, w, eps), total
