"""Files of clients: their contents in a folder, what is known of them in the database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from vllmx_core.errors import VllmxError, shown

from vllmx_server.apis.batches.answers import FileObject
from vllmx_server.store.database import LOOK, Database, StorageError, logger, new_id, now
from vllmx_server.store.folder import Folder

T = TypeVar("T")
MESSAGES = "message_batch"
"""The purpose of files that no client uploaded; lists of files leave them out."""
_LIST = (
    "SELECT * FROM files WHERE owner = ? AND (expires IS NULL OR expires > ?)"
    " AND purpose NOT GLOB 'message_batch*'"  # which no client has uploaded or may download
)
_AFTER = {
    True: " AND rowid < (SELECT rowid FROM files WHERE id = ? AND owner = ?)",
    False: " AND rowid > (SELECT rowid FROM files WHERE id = ? AND owner = ?)",
}
_ORDER = {True: " ORDER BY rowid DESC LIMIT ?", False: " ORDER BY rowid LIMIT ?"}


class FileNotKnownError(VllmxError):
    """Says that there is no such file, or that it is another key's."""

    http_status = 404
    code = "file_not_found"


class StorageFullError(VllmxError):
    """A key has as much here as it may."""

    http_status = 413
    code = "storage_full"


class StoredFile(msgspec.Struct, frozen=True):
    """A row of the table of files."""

    id: str
    owner: str
    """The API key's name; empty without keys."""
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int | None

    def shown(self) -> FileObject:
        """The object in the form of OpenAI's API."""
        return FileObject(
            id=self.id,
            bytes=self.bytes,
            created_at=self.created,
            expires_at=self.expires,
            filename=self.name,
            purpose=self.purpose,
        )


_FILE_BYTES = 4096
"""The bytes that a file counts besides its content: a place on the disk and in the database."""


class Quota(NamedTuple):
    """The most that one key may keep, or the amount that it keeps."""

    num_bytes: int
    num_files: int


class Files:
    """Contents have their ids as names on disk, which are made here and never by a client.

    Args:
        quota: of one key.
        lifetime_s: how long a file is kept.
    """

    def __init__(self, database: Database, folder: Folder, quota: Quota, lifetime_s: int) -> None:
        self._database = database
        self._folder = folder
        self._quota = quota
        self._lifetime_s = lifetime_s
        self._arriving: dict[str, list[int]] = {}
        """Bytes of each file that arrives."""
        self._threads = ThreadPoolExecutor(2, "vllmx-files")

    async def on_thread(
        self, work: Callable[[], T], undo: Callable[[T], object] | None = None
    ) -> T:
        """Runs `work`, which uses the disk; `undo` gets its result if nobody waits for it any more,
        so that a file that was just opened is closed. Raises StorageError if that fails."""

        def guarded() -> T:
            try:
                return work()
            except OSError as error:
                failed = StorageError(error.strerror or type(error).__name__)
                logger.error("a file failed: %s: %s", failed.reason, LOOK)
                raise failed from None

        running = asyncio.get_running_loop().run_in_executor(self._threads, guarded)
        if undo is None:
            return await running
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(
                lambda done: None if done.exception() else undo(done.result())
            )
            raise

    def path(self, file_id: str) -> Path:
        """The path of the content of a known file."""
        return self._folder.files() / file_id

    def new_path(self) -> Path:
        """A path for a content that begins to arrive; `keep` gives it its place."""
        return self._folder.files() / (new_id("") + ".part")

    async def take(self, owner: str, num_bytes: int) -> None:
        """Counts a file that arrives. Raises StorageFullError, and nothing is counted then."""
        known = await self._database.run(lambda c: _kept_of(c, owner))
        arriving = self._arriving.get(owner, [])
        num_files = known.num_files + len(arriving)
        if num_files >= self._quota.num_files:
            raise StorageFullError(
                f"{num_files} files are kept for this key, the limit is {self._quota.num_files}:"
                " delete files or batches of Messages, or raise --max-stored-files"
            )
        taken, wanted = known.num_bytes + sum(arriving), num_bytes + _FILE_BYTES
        if taken + wanted > self._quota.num_bytes:
            raise StorageFullError(
                f"{taken} bytes of files are kept for this key, {wanted} more would be over the"
                f" limit of {self._quota.num_bytes}, where each file counts for {_FILE_BYTES} more"
                " than it has: delete files or batches of Messages, or raise --max-stored-bytes"
            )
        self._arriving.setdefault(owner, []).append(wanted)

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Ends the count that `take` began."""
        self._arriving[owner].remove(num_bytes + _FILE_BYTES)
        if not self._arriving[owner]:
            del self._arriving[owner]

    def new_file(
        self, owner: str, name: str, purpose: str, num_bytes: int, lifetime_s: int | None = None
    ) -> StoredFile:
        """A file that `keep` may keep."""
        created = now()
        expires = created + (self._lifetime_s if lifetime_s is None else lifetime_s)
        return StoredFile(new_id("file-"), owner, name, purpose, num_bytes, created, expires)

    async def keep(
        self,
        contents: Sequence[tuple[StoredFile, Path]],
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        """Keeps contents under their ids, and in the same transaction does `also`."""
        for found, content in contents:
            place = self.path(found.id)
            await self.on_thread(partial(_settle, content, place))

        def insert(connection: sqlite3.Connection) -> None:
            for found, _ in contents:
                insert_file(connection, found)
            if also is not None:
                also(connection)

        await self._database.run(insert)

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises FileNotKnownError."""
        found = await self._database.run(lambda c: get_file(c, owner, file_id))
        if found is None:
            raise FileNotKnownError(
                f"there is no file {shown(file_id)}: GET /v1/files lists those of this key"
            )
        return found

    async def page(
        self, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """A page of them, and whether more follow."""
        query = _LIST
        values: list[Any] = [owner, now()]
        if purpose is not None:
            query += " AND purpose = ?"
            values.append(purpose)
        if after is not None:
            query += _AFTER[newest_first]
            values += [after, owner]
        query += _ORDER[newest_first]
        values.append(limit + 1)
        rows = await self._database.run(lambda c: c.execute(query, values).fetchall())
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, file_id: str) -> None:
        """Deletes a known file; does nothing where it is gone already."""
        await self._forget([file_id])

    async def clean(self) -> None:
        """Deletes what has expired."""
        await self._forget(await self._database.run(_expired))

    async def _forget(self, ids: list[str]) -> None:
        """Deletes files, which may be gone. A full disk has no room even for the note that they
        are: their contents make it."""
        try:
            await self._database.run(lambda c: _delete(c, ids))
        except StorageError:
            await self._unlink(ids)
            await self._database.run(lambda c: _delete(c, ids))
        await self._unlink(ids)

    async def _unlink(self, ids: list[str]) -> None:
        for file_id in ids:
            await self.on_thread(partial(self.path(file_id).unlink, missing_ok=True))

    async def clean_strangers(self) -> None:
        """Deletes contents that no file has, of uploads that did not end. At the start only."""
        query = "SELECT id FROM files"
        known = await self._database.run(lambda c: {row[0] for row in c.execute(query)})

        def remove() -> None:
            for path in self._folder.files().iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)

        await self.on_thread(remove)

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown()


def get_file(connection: sqlite3.Connection, owner: str, file_id: str) -> StoredFile | None:
    """None where there is none, it is another's or has expired."""
    row = connection.execute(
        "SELECT * FROM files WHERE id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
        (file_id, owner, now()),
    ).fetchone()
    return None if row is None else StoredFile(*row)


def insert_file(connection: sqlite3.Connection, found: StoredFile) -> None:
    """Makes it known."""
    connection.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(found)
    )


def _kept_of(connection: sqlite3.Connection, owner: str) -> Quota:
    query = "SELECT coalesce(sum(bytes), 0), count(*) FROM files WHERE owner = ?"
    num_bytes, num_files = connection.execute(query, (owner,)).fetchone()
    return Quota(num_bytes + num_files * _FILE_BYTES, num_files)


def _delete(connection: sqlite3.Connection, ids: Iterable[str]) -> None:
    connection.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in ids])


def _expired(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT id FROM files WHERE expires <= ?"
    return [row[0] for row in connection.execute(query, (now(),))]


def _settle(content: Path, place: Path) -> None:
    """Flushes a content to the disk and moves it to its place, before a client can see it."""
    descriptor = os.open(content, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    content.rename(place)
