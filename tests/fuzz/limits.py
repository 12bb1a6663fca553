"""What an input may cost: time and memory by its size."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

BASE_BYTES = 64 << 20
"""Grammar tables, a decoder of 1024 layers: what a small file may lead to."""
BYTES_PER_BYTE = 200
"""Of Python objects for each byte of JSON, at worst `{},` over and over."""
MAX_CPU_S = 10.0
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run_bounded(one_input: Callable[[bytes], bool], data: bytes) -> bool:
    """`one_input(data)`; AssertionError where it took more than an input of this size may.

    CPU time, so that a busy machine changes nothing. Memory of Python and numpy, touched or not, as
    tracemalloc sees it, and of native code as the growth of the resident set, where Linux tells.
    """
    limit = BASE_BYTES + BYTES_PER_BYTE * len(data)
    resident = _reset_peak()
    tracemalloc.start(1)
    start = time.process_time()
    try:
        result = one_input(data)
        cpu_s = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    grown = _peak_resident() - resident
    assert peak <= limit, f"{len(data)} bytes made Python allocate {peak}, {limit} are allowed"
    assert grown <= limit, f"{len(data)} bytes made the process grow by {grown}, {limit} allowed"
    assert cpu_s <= MAX_CPU_S, f"{len(data)} bytes took {cpu_s:.1f} s of CPU time"
    return result


def _reset_peak() -> int:
    """Sets the peak of the resident set to what is resident now, and gives that; 0: unknown."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return 1 << 62
    return _peak_resident()


def _peak_resident() -> int:
    if not _STATUS.exists():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM:")), 0)
