"""`spread`: logits of a reduced vocabulary in the places of the whole one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllmx_core.ops.op import ArrayOp, expect, expect_vector, expect_weight
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class Spread(ArrayOp):
    """(L, D) logits -> (L, V): entry v is the logit `sources[v]`, -inf where that is negative. So a
    drafter with a head for D of its target's V ids draws the target's ids, with their noise."""

    name: ClassVar[str] = "spread"
    x: Value
    sources: WeightRef
    out: Value

    @classmethod
    def of(cls, x: Value, sources: WeightRef) -> Spread:
        expect(isinstance(x, Value), f"x is {x!r}, not what another op returned")
        expect_weight(sources, "constant" if sources.kind == "constant" else "vector")
        return cls(x, sources, Value(sources.rows, x.rows, x.dtype))

    def check(self) -> None:
        logits = self.x.rows == "L" and self.x.dtype == "f32"
        expect(logits, "x must be what `logits` gave")
        expect_vector(self.sources, self.out.width)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        sources, xp = frame.vector(self.sources), frame.xp  # (V,) float32 holds ids below 2 ** 24
        found = frame[self.x][:, xp.cast(xp.clip(sources, 0, self.x.width - 1), xp.int32)]
        frame[self.out] = xp.where((sources >= 0)[None, :], found, -np.inf)
