"""How much memory of the host there is to take, giving some back, and how messages write sizes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from vllmx_core.backend import Backend, HasMemory
from vllmx_core.processors import CGROUP_ROOT, cgroup_folders

GIB = 1 << 30


def free_bytes(cgroup_root: Path = CGROUP_ROOT, process: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what the cgroup's limit
    leaves, whichever is less."""
    free = _system_free()
    for folder in cgroup_folders(cgroup_root, process, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < 1 << 60:
                free = min(free, max(0, limit - used + _file_cache(folder)))
    return free


def free_memory(backend: Backend) -> int:
    """Memory that a model may take where a backend runs it: what the backend says of it, else the
    host's."""
    return backend.free_bytes() if isinstance(backend, HasMemory) else free_bytes()


def _system_free() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS has no figure for what is free: half of the memory is a safe one
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
