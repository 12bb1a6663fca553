"""`combine`: the results of experts on many ranks, added token by token."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import numpy as np

from vllmx_core.communicator import RowRanks
from vllmx_core.ops.op import Op, expect
from vllmx_core.ops.values import ArrayFrame, Value


class Combine(Op):
    """x (T, E), each rank's sum over its own experts -> the sum over all ranks, on all ranks.
    Only ranks that have one of a token's experts `ids` (T, k) take part for that token; `ends[r]`
    is one past the last expert of rank r. With many ranks, sharding puts it after experts instead
    of `all_reduce`; models do not write it. Backends whose ranks are `RowRanks` compute it by its
    formula."""

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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        ends = np.array(self.ends, np.int32)
        begins = np.array((0, *self.ends[:-1]), np.int32)
        ids = frame[self.ids][:, :, None]  # (T, k, 1)
        here = (ids >= frame.upload(begins)) & (ids < frame.upload(ends))  # (T, k, ranks)
        x = frame.xp.wide(frame[self.x])
        ranks = cast(RowRanks[Any], frame.ranks)
        frame[self.out] = ranks.sum_rows(x, here.any(axis=1))
