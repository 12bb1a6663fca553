"""SQLite on a thread of its own, with the folder of `--data-dir`; ids and times of objects."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vllmx_core.errors import ConfigError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.store.folder import TEMPORARY, Folder


def new_id(prefix: str) -> str:
    """Makes an id that cannot be guessed: 128 bits."""
    return prefix + secrets.token_hex(16)


def now() -> int:
    """Seconds since 1970, as OpenAI's API counts."""
    return int(time.time())


T = TypeVar("T")
logger = logging.getLogger("vllmx.server")
VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, purpose TEXT, bytes INTEGER, created INTEGER,
    expires INTEGER
);
CREATE INDEX files_of ON files (owner);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, is_open INTEGER, record BLOB
);
CREATE INDEX batches_of ON batches (owner);
CREATE TABLE lines (
    batch TEXT, number INTEGER, start INTEGER, length INTEGER, custom_id TEXT,
    state INTEGER DEFAULT 0, losses INTEGER DEFAULT 0, answer BLOB,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX pending ON lines (batch, state, number);
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, expires INTEGER, is_open INTEGER,
    bytes INTEGER, record BLOB
);
CREATE INDEX responses_of ON responses (owner);
"""
_ADDED = """
CREATE TABLE IF NOT EXISTS events (response TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS forget_events AFTER DELETE ON responses BEGIN
    DELETE FROM events WHERE response = old.id;
END;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, used INTEGER, bytes INTEGER, metadata BLOB
);
CREATE INDEX IF NOT EXISTS conversations_of ON conversations (owner);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY, conversation TEXT, id TEXT, record BLOB,
    UNIQUE (conversation, id)
);
CREATE TRIGGER IF NOT EXISTS forget_items AFTER DELETE ON conversations BEGIN
    DELETE FROM items WHERE conversation = old.id;
END;
"""
"""Parts that databases of the same version may lack, which older servers leave alone."""
LOOK = "look whether there is room where --data-dir is, and whether it can be written"
"""The log's advice to whoever runs the server."""
_OF_THE_DISK = tuple(
    f"SQLITE_{name}"
    for name in ("FULL", "IOERR", "CANTOPEN", "READONLY", "PERM", "BUSY", "NOTADB", "CORRUPT")
)


class StorageError(VllmxError):
    """Data cannot be written or read: a full disk, say. `reason` is what the system or SQLite says,
    for the log and operators; answers do not hold it."""

    http_status = 503
    code = "storage_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "what this request needs cannot be kept or read just now: the server's log says why"
        )
        self.reason = reason


class Database:
    """One connection to the file `path` (or `TEMPORARY`), opened at first use, and one thread for
    it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "vllmx-store")

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `work` on the thread: all of its changes are kept, or none.
        Raises StorageError, and what `work` raises of vllmx's errors."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)

    @property
    def is_open(self) -> bool:
        """True if the database has been used."""
        return self._connection is not None

    def close(self) -> None:
        """Waits for what is under way. May be called twice."""
        if self._connection is not None:
            self._thread.submit(self._connection.close).result()
            self._connection = None
        self._thread.shutdown()

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = _open(self._path)
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                found = work(connection)
                connection.execute("COMMIT")
                return found
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            failed = StorageError(_reason(error))
            if isinstance(error, OSError) or _reason(error).startswith(_OF_THE_DISK):
                logger.error("the store failed: %s: %s", failed.reason, LOOK)
            else:
                logger.error("the store failed: %s\n%s", failed.reason, private_traceback(error))
            raise failed from None


def _reason(error: sqlite3.Error | OSError) -> str:
    """SQLite's own messages may quote what a request holds, its names of errors do not."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return getattr(error, "sqlite_errorname", type(error).__name__)


def _open(path: str) -> sqlite3.Connection:
    if path != TEMPORARY:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        script = f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
        connection.executescript(script)
    elif version != VERSION:
        connection.close()
        raise ConfigError(
            f"{path} was written by another version of vllmx (its form is {version}, this one"
            f" writes {VERSION}): give another --data-dir",
            param="data_dir",
        )
    connection.executescript(_ADDED)
    return connection


class Storage:
    """Files and database, which is opened when needed, in `data_dir` (None: nothing outlives the
    server) or an opened `folder`. Raises ConfigError if the folder cannot be used."""

    def __init__(self, data_dir: str | None, folder: Folder | None = None) -> None:
        self.folder = folder or Folder(data_dir)
        self.database = Database(self.folder.database)

    async def check(self) -> None:
        """Raises ConfigError where a folder that was named can keep nothing."""
        try:
            await self.database.run(lambda connection: None)
        except StorageError as error:
            raise ConfigError(
                f"nothing can be kept in --data-dir {self.folder.database} just now"
                f" ({error.reason}): free some space there, or name another folder",
                param="data_dir",
            ) from None

    def close(self) -> None:
        """Waits for work in progress. May be called twice."""
        self.database.close()
        self.folder.close()
