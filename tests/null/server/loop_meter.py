"""How long the event loop is held, in CPU time of its thread: a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class LoopMeter:
    """`longest_ms`: of one callback, which is one step of a task."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.what = ""

    def note(self, elapsed_s: float, handle: asyncio.Handle) -> None:
        if elapsed_s * 1e3 > self.longest_ms:
            self.longest_ms, self.what = elapsed_s * 1e3, repr(handle)


@contextmanager
def loop_meter() -> Iterator[LoopMeter]:
    """Measures every callback of the loops of this thread. The garbage collector, whose pauses
    belong to the heap of all tests, rests meanwhile."""
    meter, run = LoopMeter(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        before = time.thread_time()
        run(handle)
        meter.note(time.thread_time() - before, handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", measured)
        gc.disable()
        try:
            yield meter
        finally:
            gc.enable()
