"""How long other threads keep the interpreter lock in one go: the event loop stands still as long.

A thread that does nothing but sleep notes how late it wakes, and how much CPU time one other thread
had meanwhile: the smaller of both is what that thread can have held the lock for. A busy machine
wakes the sleeper late, but gives no thread CPU time for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .loop_meter import shortest

T = TypeVar("T")

_SLEEP_S = 0.001
_NOTED_S = 0.005
"""Python code lets go of the lock after so long when others want it."""


class LockMeter:
    """`longest_ms`: of one thread; `what` is its name."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.what = ""
        self._ended = threading.Event()

    def watch(self) -> None:
        """Looks until `end`."""
        before_s, clocks = time.monotonic(), _cpu_s()
        while not self._ended.is_set():
            time.sleep(_SLEEP_S)
            late_s, now = time.monotonic() - before_s, _cpu_s()
            for name, used_s in now.items():
                held_ms = min(late_s, used_s - clocks.get(name, used_s)) * 1e3
                if held_ms > max(_NOTED_S * 1e3, self.longest_ms):
                    self.longest_ms, self.what = held_ms, name
            before_s, clocks = time.monotonic(), now

    def end(self) -> None:
        self._ended.set()


def _cpu_s() -> dict[str, float]:
    """The CPU time that each thread has had, without the one that asks."""
    found = {}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            found[thread.name] = time.clock_gettime(clock)
    return found


@contextmanager
def lock_meter() -> Iterator[LockMeter]:
    meter = LockMeter()
    watching = threading.Thread(target=meter.watch, name="lock-meter")
    watching.start()
    try:
        yield meter
    finally:
        meter.end()
        watching.join()


async def shortest_lock(
    action: Callable[[], Awaitable[T]], limit_ms: float, tries: int = 4
) -> tuple[LockMeter, T]:
    """As `loop_meter.shortest_hold`, of the lock."""
    return await shortest(lock_meter, action, limit_ms, tries)
