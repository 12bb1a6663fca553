"""The recorded step as the native team walks it: a C array of functions and their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from vllmx_core.records import Record

from vllmx_cpu.structs import VxRecord


class Call(Record):
    """One native op: its name for profiles, its function's address and its arguments."""

    name: str
    function: int
    arguments: ctypes.Structure
    pooled: bool = False
    """True if the rows are the step's logit rows instead of its tokens."""

    @property
    def record(self) -> VxRecord:
        """The call in the form that the team of threads takes."""
        return VxRecord(self.function, ctypes.addressof(self.arguments), int(self.pooled))


class Tape(Record):
    """Lowered ops in a C array; `calls` keeps their arguments alive."""

    records: ctypes.Array[VxRecord]
    calls: Sequence[Call]


def make_tape(calls: Sequence[Call]) -> Tape:
    """The calls in their order."""
    records = (VxRecord * len(calls))(*(call.record for call in calls))
    return Tape(records, calls)
