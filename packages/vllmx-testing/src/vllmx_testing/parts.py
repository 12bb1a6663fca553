"""Parts and layouts that tests make."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from vllmx_core.plan import F32
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import Index, Layout, StoredPart, WeightPart


class MadePart(WeightPart):
    """A part whose rows [begin, end) a test makes."""

    make: Callable[[int, int], StoredPart]

    def rows(self, begin: int, end: int) -> StoredPart:
        return self.make(begin, end)


class IntegerLayout(Layout):
    """Integers that a test makes; float32 is made of them."""

    coder: Callable[[slice], CodedRows] | None = None
    kind: ClassVar[str] = "any"
    has_codes: ClassVar[bool] = True

    @property
    def row_wise(self) -> bool:
        return False

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        assert self.coder is not None
        assert isinstance(rows, slice)
        return self.coder(rows)

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        return part.coded_rows(begin, end).to_f32()
