"""Opens files of a model, data from somebody else: without waiting, and only regular files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from vllmx_core.errors import WeightFormatError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")

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


def open_model_file(path: Path) -> BinaryIO:
    """Opens a file of a model as `open_regular` does.

    Raises:
        OSError: as `open_regular`.
        WeightFormatError: another thing has the file's name: the pointer that Git LFS leaves in a
            checkout without the files themselves, or a web page that was saved in its place.
    """
    file = open_regular(path)
    try:
        start = file.read(len(_LFS_POINTER))
        file.seek(0)
        if start == _LFS_POINTER:
            raise WeightFormatError(
                f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in its folder, or"
                " download the file from the model's page"
            )
        if start.lstrip().lower().startswith(_PAGES):
            raise WeightFormatError(
                f"{path} is a web page, not the file: download it from the address that the model's"
                " page gives for the download, with a token where the model is gated"
            )
    except BaseException:
        file.close()
        raise
    return file


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
        return descriptor
    os.close(descriptor)
    kind = next((name for matches, name in _KINDS if matches(mode)), "of an unknown kind")
    raise OSError(errno.EINVAL, f"it is {kind} and not a regular file")
