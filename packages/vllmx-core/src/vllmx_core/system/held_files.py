"""Files whose content stays in memory while nobody uses it."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

logger = logging.getLogger("vllmx")


class HeldFiles:
    """The pages of some files in the system's cache, until `close`. They are locked there if the
    process may lock so much (`ulimit -l`, `LimitMEMLOCK`); otherwise the system may drop them when
    memory runs short. Processes that read the files share the pages."""

    def __init__(self, paths: Iterable[Path]) -> None:
        import ctypes  # few starts need it

        self._maps: list[mmap.mmap] = []
        self.num_bytes = self.num_locked = 0
        lock = getattr(ctypes.CDLL(None, use_errno=True), "mlock", None)
        for path in paths:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    continue
                pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
                self._maps.append(pages)
                self.num_bytes += size
                address = np.frombuffer(pages, np.uint8).ctypes.data
                if lock and not lock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
                    self.num_locked += size
                else:
                    while file.read(1 << 24):  # as much as is cached, nothing more
                        pass
        if self.num_locked < self.num_bytes:
            logger.warning(
                "only %d of %d bytes of weights are locked in memory: raise `ulimit -l` to keep the"
                " rest there when memory runs short",
                self.num_locked,
                self.num_bytes,
            )

    def close(self) -> None:
        """Lets the pages go."""
        for pages in self._maps:
            pages.close()
        self._maps.clear()


def weight_files(path: Path) -> list[Path]:
    """A model's files of weights: the file, or those of a folder."""
    if path.is_file():
        return [path]
    return sorted(one for kind in ("*.safetensors", "*.gguf") for one in path.glob(kind))
