"""`adapt`: adds what a row's adapter adds to a product. A pass makes it, no model."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_same_width
from vllmx_core.ops.values import ArrayFrame, TokenIds, Value, WeightRef


class Adapt(ArrayOp):
    """y + B (A x) for each token whose row has an adapter (Hu et al. 2021, arXiv:2106.09685), with
    the A (r, K) and B (N, r) of the adapter in the row's slot; y itself for other tokens. `w` is
    the weight that gave y. The result may share its memory with y, which nothing else reads.

    See `vllmx_core.recorded.passes.with_adapters` and `StepPlan.adapters`."""

    name: ClassVar[str] = "adapt"
    x: Value | TokenIds
    """The operand of `w`: features, or the ids of an embedding."""
    y: Value
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, x: Value | TokenIds, y: Value, w: WeightRef) -> Adapt:
        return cls(x, y, w, Value(y.width, y.rows, y.dtype))

    def check(self) -> None:
        expect_same_width(y=self.y, out=self.out)
        if isinstance(self.x, Value):
            expect(self.x.width == self.w.cols, f"{self.w.name!r} does not multiply x")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        xp, y = frame.xp, frame[self.y]
        for slot, rows in frame.adapted_rows(self.y.rows):
            for piece in frame.adapters[slot].get(self.w.name, ()):
                shrunk = self._operand(frame, piece.a, rows)  # (n, r)
                begin, end = piece.begin, piece.end
                added = xp.wide(y[rows, begin:end]) + shrunk @ piece.b.T
                y[rows, begin:end] = xp.like(y, added)
        frame[self.out] = y

    def _operand(self, frame: ArrayFrame[Any], a: Any, rows: Any) -> Any:
        """(n, r): A x of these rows of y."""
        if isinstance(self.x, TokenIds):
            return a[:, frame.ids(self.x)[rows]].T
        if self.x.rows != self.y.rows:  # a head: its rows are picked tokens
            rows = frame.upload(frame.plan.logit_rows)[rows]
        return frame.xp.wide(frame[self.x][rows]) @ a.T
