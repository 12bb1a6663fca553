"""`all_gather`: the features of all ranks, concatenated on each of them."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.values import ArrayFrame, Value


class AllGather(ArrayOp):
    """x (L, widths[rank]) of all ranks -> (L, sum of the widths), in the order of the ranks.
    Sharding puts it behind the head, of which each rank has a part of the vocabulary."""

    name: ClassVar[str] = "all_gather"
    x: Value
    widths: tuple[int, ...]
    out: Value

    @classmethod
    def of(cls, x: Value, widths: tuple[int, ...]) -> AllGather:
        return cls(x, widths, Value(sum(widths), x.rows, x.dtype))

    def check(self) -> None:
        expect(self.x.width in self.widths, f"x has {self.x.width} features, not a rank's")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.ranks.all_gather(frame.xp.wide(frame[self.x]), self.widths)
