"""`all_reduce`: the sum over all ranks, on each of them."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.values import ArrayFrame, Value


class AllReduce(ArrayOp):
    """x (T, E) of all ranks, added as `vllmx_core.communicator.tree_sum` does. Sharding puts it
    after products with a part of the input features; models do not write it."""

    name: ClassVar[str] = "all_reduce"
    x: Value
    out: Value

    @classmethod
    def of(cls, x: Value) -> AllReduce:
        return cls(x, Value(x.width, x.rows, x.dtype))

    def check(self) -> None:
        expect(self.x.dtype != "i32", "ids cannot be added")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.ranks.all_reduce(frame.xp.wide(frame[self.x]))
