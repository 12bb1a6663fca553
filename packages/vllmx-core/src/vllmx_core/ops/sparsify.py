"""`sparsify`: the features of a row that stand out, less the rest."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value


class Sparsify(ArrayOp):
    """x (T, F) -> max(x - c, 0), the cutoff c being the row's mean plus `deviations` times its
    standard deviation: of normal features a share is left that `deviations` determines."""

    name: ClassVar[str] = "sparsify"
    x: Value
    deviations: float
    out: Value

    @classmethod
    def of(cls, x: Value, deviations: float) -> Sparsify:
        expect_rows(x=x)
        return cls(x, deviations, Value(x.width, x.rows))

    def check(self) -> None:
        finite = abs(self.deviations) < float("inf")
        expect(finite, f"deviations is {self.deviations}, which is no finite number")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = sparsify(frame[self.x], self.deviations, frame.xp)


def sparsify(x: Array, deviations: float, xp: Arrays = NUMPY) -> Array:
    """(T, F) -> (T, F)."""
    wide = xp.wide(x)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    spread = xp.sqrt(xp.square(centred).mean(axis=-1, keepdims=True))
    return xp.like(x, xp.relu(centred - deviations * spread))
