"""`clip`: values side by side, each held between bounds of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_rows, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class Clip(ArrayOp):
    """(T, F) of one to three values, the features of one behind those of the other; `bounds` has
    the lowest and the highest number of the first, then those of the second ... NaN stays NaN."""

    name: ClassVar[str] = "clip"
    x: Value
    y: Value | None
    z: Value | None
    bounds: WeightRef
    out: Value

    @classmethod
    def of(
        cls, x: Value, bounds: WeightRef, y: Value | None = None, z: Value | None = None
    ) -> Clip:
        given = {"x": x} | {name: one for name, one in (("y", y), ("z", z)) if one is not None}
        expect_rows(**given)
        width = sum(value.width for value in given.values())
        return cls(x, y, z, bounds, Value(width, x.rows))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first feature of each operand in the result."""
        ends = np.cumsum([value.width for value in self.reads])
        return (0, *(int(end) for end in ends[:-1]))

    def check(self) -> None:
        expect_vector(self.bounds, self.bounds.rows)
        given = f"{self.bounds.name!r} has {self.bounds.rows} values"
        count = len(self.reads)
        expect(self.bounds.rows == 2 * count, f"{given}, not two for each of {count} operands")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        bounds = frame.vector(self.bounds).reshape(-1, 2)
        parts = [clip(frame[x], bounds[index], frame.xp) for index, x in enumerate(self.reads)]
        frame[self.out] = frame.xp.concatenate(parts, axis=-1)


def clip(x: Array, bounds: Array, xp: Arrays = NUMPY) -> Array:
    """(T, F), (low, high) -> (T, F)."""
    return xp.like(x, xp.clip(x, bounds[0], bounds[1]))
