"""`recv`: a value from the previous stage."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.values import ArrayFrame, Value


class Recv(ArrayOp):
    """-> (T, E), of the rank of the stage before; see `vllmx_core.ops.send.Send`."""

    name: ClassVar[str] = "recv"
    out: Value

    @classmethod
    def of(cls, width: int) -> Recv:
        return cls(Value(width))

    def check(self) -> None:
        features = (self.out.rows, self.out.dtype) == ("T", "model")
        expect(features, "what is received is no array of features with a row for each token")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.ranks.recv((frame.plan.num_tokens, self.out.width))
