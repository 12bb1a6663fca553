"""`keep`: a tower's features go into the feature store."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.patches import patches_in
from vllmx_core.ops.values import ArrayFrame, Value


class Keep(ArrayOp):
    """Row i of x (L, E) becomes row `PatchRows.keep[i]` of a part of the store, float32. The
    recorder appends one for each of the features that a tower returns."""

    name: ClassVar[str] = "keep"
    results: ClassVar[tuple[str, ...]] = ()
    x: Value
    part: int

    @classmethod
    def of(cls, x: Value, part: int) -> Keep:
        return cls(x, part)

    def check(self) -> None:
        merged = (self.x.rows, self.x.dtype) == ("L", "model")
        expect(merged, "features are rows that `merge` gave, and what follows from them")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        rows = frame.upload(patches_in(frame.plan).keep)
        frame.features[self.part][rows] = frame.xp.wide(frame[self.x])
