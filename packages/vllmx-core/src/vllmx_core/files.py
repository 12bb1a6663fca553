"""Opens files of a model, data from somebody else: without waiting, and only regular files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """The file, opened for reading; links are followed.

    Raises:
        OSError: as `open` does; for what is not a regular file too, saying what it is. Opening a
            pipe would otherwise wait for its writer, and a device has no end.
    """
    return open(path, "rb", opener=_open)


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
        return descriptor
    os.close(descriptor)
    kind = next((name for matches, name in _KINDS if matches(mode)), "of an unknown kind")
    raise OSError(errno.EINVAL, f"it is {kind} and not a regular file")
