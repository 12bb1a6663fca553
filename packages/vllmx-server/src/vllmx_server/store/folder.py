"""The folder of `--data-dir`, which one server has at a time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from vllmx_core.errors import ConfigError

TEMPORARY = ""
"""SQLite's name for a database on disk that has no name and goes with its connection."""
_PREFIX = "vllmx-data-"


class Folder:
    """The folder where things are kept. Without a path the database has no name on the disk, and
    files are in a temporary folder that is made when it is needed: nothing outlives the server
    then.

    Args:
        outlives: what is kept is found again by the next server; None: where there is a path.
        is_locked: another process of this server holds the lock.

    Raises ConfigError where the folder cannot be used, or another server uses it.
    """

    def __init__(
        self, path: str | None, *, outlives: bool | None = None, is_locked: bool = False
    ) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._temporary: Path | None = None
        self._lock: int | None = None
        self.outlives = path is not None if outlives is None else outlives
        if self._path is not None and not is_locked:
            self._lock = _locked(self._path)

    @property
    def database(self) -> str:
        """The path of the database as sqlite3 takes it."""
        return TEMPORARY if self._path is None else str(self._path / "vllmx.sqlite3")

    def files(self) -> Path:
        """The folder of the files, made when it is not there."""
        base = self._path
        if base is None:
            if self._temporary is None:
                self._temporary = temporary_folder()
                self._lock = _locked(self._temporary)
            base = self._temporary
        found = base / "files"
        found.mkdir(mode=0o700, exist_ok=True)
        return found

    def close(self) -> None:
        """Lets the next server in. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def temporary_folder() -> Path:
    """A new folder for what ends with this server, which locks it. Those of servers that were
    killed are removed: what clients sent must not outlive them for longer."""
    for found in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_left(found)
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _remove_left(folder: Path) -> None:
    """Removes a folder of this user that was locked once and is not any more."""
    try:
        if folder.lstat().st_uid != os.getuid() or not (folder / "lock").is_file():
            return
        lock = _locked(folder)
    except (OSError, ConfigError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _locked(path: Path) -> int:
    """The descriptor that holds the lock: the system lets go of it when the process ends, however
    that is."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--data-dir {path} cannot be used ({error.strerror}): name a folder that vllmx may"
            " write to",
            param="data_dir",
        ) from None
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(found)
            raise ConfigError(
                f"--data-dir {path} is used by another server: give each one of its own",
                param="data_dir",
            ) from None
    return found
