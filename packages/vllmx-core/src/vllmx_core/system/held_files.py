"""Files whose content stays in memory while nobody uses it."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

logger = logging.getLogger("vllmx")


class HeldFiles:
    """The pages of some files in the system's cache, until `close`. They are locked there if the
    process may lock so much (`ulimit -l`, `LimitMEMLOCK`); otherwise the system may drop them when
    memory runs short. Processes that read the files share the pages. The log names files that
    cannot be held."""

    def __init__(self, paths: Iterable[Path]) -> None:
        import ctypes  # few starts need it

        self._maps: list[mmap.mmap] = []
        self.num_bytes = self.num_locked = 0
        try:
            lock = ctypes.CDLL(None, use_errno=True).mlock
        except (OSError, TypeError, AttributeError):  # as on Windows
            lock = None
        for path in paths:
            try:
                self._hold(path, lock)
            except OSError as error:
                logger.warning("%s cannot stay in memory (%s)", path, error.strerror)
        if lock is not None and self.num_locked < self.num_bytes:
            logger.warning(
                "only %d of %d bytes of weights are locked in memory: raise `ulimit -l` to keep the"
                " rest there when memory runs short",
                self.num_locked,
                self.num_bytes,
            )

    def _hold(self, path: Path, lock: Callable[[object, object], int] | None) -> None:
        import ctypes

        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return
            self.num_bytes += size
            if lock is not None:
                pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
                self._maps.append(pages)
                address = np.frombuffer(pages, np.uint8).ctypes.data
                if not lock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
                    self.num_locked += size
                    return
            while file.read(1 << 24):  # as much as is cached, nothing more
                pass

    def close(self) -> None:
        """Lets the pages go."""
        for pages in self._maps:
            pages.close()
        self._maps.clear()
