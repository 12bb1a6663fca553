"""`scale_at`: features times a factor of the token's position, such as queries of long contexts."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features, expect_vector
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value, WeightRef


class ScaleAt(ArrayOp):
    """The first `features` of x (T, F) times the entry of `table` (positions,) at the token's
    position; the others as they are."""

    name: ClassVar[str] = "scale_at"
    x: Value
    table: WeightRef
    features: int
    out: Value

    @classmethod
    def of(cls, x: Value, table: WeightRef, features: int, step: StepInputs) -> ScaleAt:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(x, table, features, Value(x.width))

    def check(self) -> None:
        expect_vector(self.table, self.table.rows)
        within = 0 < self.features <= self.x.width
        expect(within, f"{self.features} features of the {self.x.width} of x")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        factors = frame.vector(self.table)[frame.ids(StepInputs().positions)]
        frame[self.out] = scale_at(frame[self.x], factors, self.features, frame.xp)


def scale_at(x: Array, factors: Array, features: int, xp: Arrays = NUMPY) -> Array:
    """(T, F), (T,) -> (T, F)."""
    scaled = xp.like(x, xp.wide(x[:, :features]) * factors[:, None])
    return xp.concatenate([scaled, x[:, features:]], axis=-1)
