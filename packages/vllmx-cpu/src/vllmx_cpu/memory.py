"""Large buffers for weights, activations and KV pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import CapacityError
from vllmx_core.system.memory import format_bytes

Bytes = npt.NDArray[np.uint8]


def allocate(num_bytes: int) -> Bytes:
    """Zeroed bytes in pages of their own (64-byte aligned), which the kernel hands out when they
    are first touched; huge pages where it has them. Raises CapacityError."""
    try:
        # Private: shared anonymous memory gets no huge pages on most systems.
        options = {}
        if hasattr(mmap, "MAP_PRIVATE"):  # not on Windows
            options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        area = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), **options)
    except OSError as error:
        raise CapacityError(
            f"{format_bytes(num_bytes)} of address space cannot be reserved ({error}): raise the"
            " process's memory limit (ulimit -v)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)[:num_bytes]
