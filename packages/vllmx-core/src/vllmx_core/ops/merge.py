"""`merge`: neighbouring patches become one row, joined or averaged."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, Value

MergeKind = Literal["join", "mean"]
KINDS: tuple[MergeKind, ...] = get_args(MergeKind)


class Merge(ArrayOp):
    """(T, F) -> (L, count * F) or, as the mean, (L, F), for T = count * L: rows count * i to
    count * (i + 1) - 1 become row i."""

    name: ClassVar[str] = "merge"
    x: Value
    count: int
    kind: MergeKind
    out: Value

    @classmethod
    def of(cls, x: Value, count: int, kind: MergeKind = "join") -> Merge:
        expect_features(x=x)
        expect(kind in KINDS, f"unknown kind {kind!r}: choose {', '.join(KINDS)}")
        return cls(x, count, kind, Value(x.width * (count if kind == "join" else 1), "L"))

    def check(self) -> None:
        expect(self.count >= 1, f"{self.count} rows cannot be merged")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        joined = frame[self.x].reshape(-1, self.count, self.x.width)
        frame[self.out] = (
            joined.mean(axis=1) if self.kind == "mean" else joined.reshape(-1, self.out.width)
        )
