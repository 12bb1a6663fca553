"""`combine`: the results of experts on many ranks, added token by token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect
from vllmx_core.ops.values import Value


class Combine(Op):
    """x (T, E), each rank's sum over its own experts -> the sum over all ranks, on all ranks.
    Only ranks that have one of a token's experts `ids` (T, k) take part for that token; `ends[r]`
    is one past the last expert of rank r. With many ranks, sharding puts it after experts instead
    of `all_reduce`; models do not write it."""

    name: ClassVar[str] = "combine"
    x: Value
    ids: Value
    ends: tuple[int, ...]
    out: Value

    @classmethod
    def of(cls, x: Value, ids: Value, ends: tuple[int, ...]) -> Combine:
        return cls(x, ids, ends, Value(x.width))

    def check(self) -> None:
        expect(self.ids.dtype == "i32", "ids are not what `route` returned")
        last = self.ends[-1] if self.ends else 0
        expect(last == self.ids.below, f"ranks have {last} experts, ids are of {self.ids.below}")
        expect(list(self.ends) == sorted(set(self.ends)), "a rank has no experts")

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = frame.ranks.sum_rows(frame[self.x], holders(frame[self.ids], self.ends))


def holders(ids: npt.NDArray[np.int32], ends: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """(T, ranks) True if the rank has one of the token's experts."""
    held = np.zeros((len(ids), len(ends)), np.bool_)
    np.put_along_axis(held, np.searchsorted(ends, ids, side="right"), True, axis=1)
    return held
