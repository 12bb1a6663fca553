"""`scale_by`: features times a weight, which `Ops.scale` records where it is given one."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_rows, expect_weight
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class ScaleBy(ArrayOp):
    """x (T, F) * w, w (G,) with G a divisor of F: each value is for F / G neighbouring features,
    one value for all."""

    name: ClassVar[str] = "scale_by"
    x: Value
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, x: Value, w: WeightRef) -> ScaleBy:
        expect_rows(x=x)
        return cls(x, w, Value(x.width, x.rows))

    @property
    def span(self) -> int:
        """Neighbouring features that share a value."""
        return self.x.width // self.w.rows

    def check(self) -> None:
        expect_weight(self.w, "vector")
        divides = self.w.rows > 0 and self.x.width % self.w.rows == 0
        given = f"{self.w.name!r} has {self.w.rows} values"
        expect(divides, f"{given}, which do not divide x's {self.x.width} features")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = scale_by(frame[self.x], frame.vector(self.w), frame.xp)


def scale_by(x: Array, w: Array, xp: Arrays = NUMPY) -> Array:
    """(T, F), (G,) -> (T, F)."""
    runs = x.reshape(len(x), len(w), x.shape[-1] // len(w))
    return xp.like(x, (runs * w[:, None]).reshape(x.shape))
