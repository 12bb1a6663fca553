"""Counters in shared memory: publishing data with a counter, waiting for a change, and waking."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 0, 1
_SLICE_S = 0.02
_SLEEP_S = 50e-6


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_SLICE = _Timespec(0, int(_SLICE_S * 1e9))
_libc = ctypes.CDLL(None, use_errno=True)


def _nothing() -> None:
    """x86-64 keeps the order of stores, and that of loads, by itself."""


_turn = threading.Lock()


def _two_turns() -> None:
    """A lock's release keeps earlier accesses before it, its acquire keeps later ones after it.
    Acquire then release would let accesses from both sides move in and pass each other there. A
    release and the next acquire do not pass each other on ARMv8."""
    with _turn:
        pass
    with _turn:
        pass


def fence_of(system: str, machine: str) -> Callable[[], None]:
    """A fence: other processors see memory accesses before it ahead of those after it. NumPy's are
    plain accesses, which ARM processors may reorder."""
    if machine == "x86_64":
        return _nothing
    if system == "darwin":
        barrier: Callable[[], None] = _libc.OSMemoryBarrier
        return barrier
    return _two_turns


fence = fence_of(sys.platform, platform.machine())
"""Called after a counter was read and before the data that it counts is read."""


def publish(word: npt.NDArray[np.uint32], count: int) -> None:
    """Sets a counter. A thread that reads the new count and then calls `fence` sees all earlier
    writes of this thread, and its own later writes do not affect earlier reads of this thread."""
    fence()
    word[0] = count


def is_behind(seen: int, count: int) -> bool:
    """True if a counter whose value is `seen` has not reached `count`. Counters wrap at 32 bits;
    compared values never differ by half of that range."""
    return bool((seen - count) & 0x80000000)


def wait_while(word: npt.NDArray[np.uint32], seen: int) -> None:
    """Returns when the word is no longer `seen` and its writer has woken, or after a moment: the
    caller looks again."""
    if _NUMBER is None:
        time.sleep(_SLEEP_S)
        return
    address = ctypes.c_void_p(word.ctypes.data)
    _libc.syscall(_NUMBER, address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(_SLICE), None, 0)


def wake(word: npt.NDArray[np.uint32]) -> None:
    """Wakes all waiters of the word, in all processes."""
    if _NUMBER is not None:
        _libc.syscall(_NUMBER, ctypes.c_void_p(word.ctypes.data), _WAKE, 0x7FFFFFFF, None, None, 0)
