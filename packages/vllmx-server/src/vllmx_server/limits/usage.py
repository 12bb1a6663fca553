"""The usage of each key since the data folder was made."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

from vllmx_core.errors import VllmxError

from vllmx_server.store.database import Database

KEEP_EVERY_S = 5.0
_TABLE = """CREATE TABLE IF NOT EXISTS key_usage (
    client TEXT PRIMARY KEY, requests INTEGER, refused INTEGER, prompt_tokens INTEGER,
    cached_tokens INTEGER, completion_tokens INTEGER
)"""
_ADD = """INSERT INTO key_usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (client) DO UPDATE SET
    requests = requests + excluded.requests, refused = refused + excluded.refused,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens"""


@dataclass(slots=True)
class KeyUsage:
    """The usage of one key."""

    requests: int = 0
    """The requests that were taken."""
    refused: int = 0
    """The requests that a limit of the key refused."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The tokens of the prompts that came from the cache."""
    completion_tokens: int = 0

    def add(self, other: KeyUsage) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class UsageLedger:
    """Counts in memory, and adds the counts to a database, which several processes may share, a few
    seconds later.

    Args:
        database: None: the counts end with this process.
    """

    def __init__(self, database: Database | None = None) -> None:
        self._database = database
        self._new: dict[str, KeyUsage] = {}
        self._due: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None

    def of(self, client: str) -> KeyUsage:
        """The unreported usage of a client, to be changed."""
        found = self._new.get(client)
        if found is None:
            found = self._new[client] = KeyUsage()
        return found

    def take(self) -> dict[str, KeyUsage]:
        """Returns the unreported usage and clears it."""
        new, self._new = self._new, {}
        return new

    def add(self, more: Mapping[str, KeyUsage]) -> None:
        """Adds the counts of another process."""
        for client, usage in more.items():
            self.of(client).add(usage)
        self.changed()

    def changed(self) -> None:
        """Has what was counted written within `KEEP_EVERY_S`."""
        if self._database is not None and self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(KEEP_EVERY_S, self._begin_keeping)

    def _begin_keeping(self) -> None:
        self._due = None
        self._keeping = asyncio.ensure_future(self._keep_quietly())

    async def _keep_quietly(self) -> None:
        with contextlib.suppress(VllmxError):  # the log has it; nothing is lost
            await self.keep()

    async def keep(self) -> None:
        """Writes the unreported usage. Raises StorageError, and nothing is lost."""
        if self._database is None or not self._new:
            return
        new = self.take()

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_TABLE)
            rows = [(client, *astuple(usage)) for client, usage in new.items()]
            connection.executemany(_ADD, rows)

        try:
            await self._database.run(write)
        except BaseException:
            for client, usage in new.items():
                self.of(client).add(usage)
            raise

    async def all(self) -> Mapping[str, KeyUsage]:
        """Returns the usage of every client, by name. Raises StorageError."""
        if self._database is None:
            return dict(self._new)
        await self.keep()

        def read(connection: sqlite3.Connection) -> dict[str, KeyUsage]:
            connection.execute(_TABLE)
            rows = connection.execute("SELECT * FROM key_usage")
            return {client: KeyUsage(*counts) for client, *counts in rows}

        return await self._database.run(read)
