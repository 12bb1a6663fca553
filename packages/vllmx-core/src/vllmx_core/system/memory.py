"""Free memory of the host, returning freed memory to it, and sizes in messages."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllmx_core.system.processors import CGROUP_ROOT, cgroup_folders

GIB = 1 << 30


_CGROUP_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),  # beyond it processes are slowed down
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_PROCESS_LIMITS = (("RLIMIT_AS", "VmSize:", "-v"), ("RLIMIT_DATA", "VmData:", "-d"))
"""Limits of this process, what counts against each in /proc/self/status, and the shell's option."""
RESERVED_BYTES = 512 << 20
"""Address space kept for thread stacks and the heap, at most a quarter of what is left."""
FREE_MEMORY = "free memory"


class FreeBytes(int):
    """Free memory of the host, and what to do for more of it."""

    remedy: str

    def __new__(cls, value: int, remedy: str = FREE_MEMORY) -> FreeBytes:
        made = super().__new__(cls, value)
        made.remedy = remedy
        return made


def remedy_for(free: float) -> str:
    """Advice for a message if `free` bytes are too few."""
    return free.remedy if isinstance(free, FreeBytes) else FREE_MEMORY


def free_bytes(
    cgroup_root: Path = CGROUP_ROOT,
    process: Path = Path("/proc/self/cgroup"),
    status: Path = Path("/proc/self/status"),
) -> FreeBytes:
    """Memory that can be taken without swapping: the kernel's estimate, what the cgroup's limit
    leaves, or what the limits of the process leave, whichever is least."""
    bounds = [*_left_by_cgroups(cgroup_root, process), *_left_by_process(status)]
    return min([FreeBytes(_system_free()), *bounds])


def _left_by_cgroups(root: Path, process: Path) -> Iterator[FreeBytes]:
    for folder in cgroup_folders(root, process, "memory"):
        for limit_name, used_name in _CGROUP_LIMITS:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < 1 << 60:
                yield FreeBytes(
                    max(0, limit - used + _file_cache(folder)),
                    f"raise the container's memory limit ({limit_name}, now {format_bytes(limit)})",
                )


def _left_by_process(status: Path) -> Iterator[FreeBytes]:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    for name, used_name, option in _PROCESS_LIMITS:
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit == resource.RLIM_INFINITY or limit >= 1 << 60:
            continue
        left = max(0, limit - _kilobytes(status, used_name) * 1024)
        yield FreeBytes(
            left - min(left // 4, RESERVED_BYTES),
            f"raise `ulimit {option}` (now {format_bytes(limit)})",
        )


def _kilobytes(path: Path, name: str) -> int:
    """A line's number of a file under /proc; 0: there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _system_free() -> int:
    available = _kilobytes(Path("/proc/meminfo"), "MemAvailable:")
    if available:
        return available * 1024
    if sys.platform == "win32":
        return _windows_free()
    # macOS has no figure for what is free: half of the memory is a safe one
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _windows_free() -> int:
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and the load, then sizes
    kernel: Any = vars(ctypes)["windll"].kernel32
    kernel.GlobalMemoryStatusEx(status)
    return status[2]


def _file_cache(folder: Path) -> int:
    """Page cache that counts as used but is given up under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(values.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def return_unused_bytes() -> None:
    """Gives the system what freed objects left behind in the heap, which glibc keeps."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return  # another C library, or none to be asked
    trim(0)


def format_bytes(num_bytes: int) -> str:
    """Writes a size for messages, in the unit that fits."""
    if num_bytes < 1 << 20:
        return f"{num_bytes} bytes"
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
