"""Opens files of a model, which are untrusted: only regular files, so that opening never waits.
Replaces files atomically, and warns of secrets that others may read."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vllmx_core.errors import WeightFormatError

logger = logging.getLogger("vllmx.files")
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
        WeightFormatError: the file is a Git LFS pointer or a saved web page.
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


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file that replaces `path` atomically when the block ends, and is deleted if the block
    fails. If `path` is a link, its target is replaced. Owner and mode are kept. A device or a pipe
    is written to directly.

    Args:
        private: only the owner may read the new file.

    Raises:
        OSError: it cannot be written.
    """
    place = Path(os.path.realpath(path))
    before = place.stat() if place.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(place, "wb") as there:
            yield there
        return
    made = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    mode = 0o600 if private else 0o666
    try:
        handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if before is not None:
                with contextlib.suppress(OSError):  # only root gives files away
                    os.fchown(handle, before.st_uid, before.st_gid)
                if not private:
                    os.fchmod(handle, stat.S_IMODE(before.st_mode))
            os.fsync(handle)
        os.replace(made, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise


def warn_of_readers(path: str | os.PathLike[str], where: str) -> None:
    """Logs a warning if anyone but its owner may read a file with secrets.

    Args:
        where: the flag that names the file.
    """
    with contextlib.suppress(OSError):  # reading it reports the error
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning(
                "%s %s may be read by others (mode %04o): chmod 600 %s", where, path, mode, path
            )


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
        return descriptor
    os.close(descriptor)
    kind = next((name for matches, name in _KINDS if matches(mode)), "of an unknown kind")
    raise OSError(errno.EINVAL, f"it is {kind} and not a regular file")
