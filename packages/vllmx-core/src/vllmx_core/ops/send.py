"""`send`: a value for the next stage."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.values import ArrayFrame, Value


class Send(ArrayOp):
    """x (T, E) goes to the rank of the next stage, whose `recv` ops take what is sent in the same
    order. Cutting a model into stages puts it behind a layer; models do not write it."""

    name: ClassVar[str] = "send"
    results: ClassVar[tuple[str, ...]] = ()
    x: Value

    @classmethod
    def of(cls, x: Value) -> Send:
        return cls(x)

    def check(self) -> None:
        features = (self.x.rows, self.x.dtype) == ("T", "model")
        expect(features, "x is no array of features with a row for each token")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame.ranks.send(frame.xp.wide(frame[self.x]))
