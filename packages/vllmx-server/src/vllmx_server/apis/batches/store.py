"""Batches and the state of their lines, in the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec
from vllmx_core.errors import VllmxError, shown

from vllmx_server.apis.batches.answers import (
    BatchError,
    BatchErrors,
    BatchObject,
    RequestCounts,
    Status,
)
from vllmx_server.schema.record import encode
from vllmx_server.store.database import Database

PREFIX = "batch_"
"""The prefix of the ids of OpenAI's batches."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of batches that have not ended."""


class BatchNotKnownError(VllmxError):
    """Says that there is no such batch, or that it is another key's."""

    http_status = 404
    code = "batch_not_found"


class LineState(IntEnum):
    WAITS = 0
    ANSWERED = 1
    FAILED = 2


class Batch(msgspec.Struct, kw_only=True):
    """A batch as it is kept."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    status: Status = "validating"
    model: str | None = None
    errors: list[BatchError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    unanswered: int = 0
    """Lines that had no answer when the batch ended; counted in `failed`, too."""
    num_requests: int = 0
    """The number of requests, of a batch of Messages."""
    times: dict[str, int] = {}
    """The time at which it entered each status."""

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def shown(self) -> BatchObject:
        """The object in the form of OpenAI's API."""
        when = self.times.get
        return BatchObject(
            id=self.id,
            endpoint=self.endpoint,
            model=self.model,
            errors=BatchErrors(data=self.errors) if self.errors else None,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_at,
            expires_at=self.expires_at,
            in_progress_at=when("in_progress"),
            finalizing_at=when("finalizing"),
            completed_at=when("completed"),
            failed_at=when("failed"),
            expired_at=when("expired"),
            cancelling_at=when("cancelling"),
            cancelled_at=when("cancelled"),
            request_counts=RequestCounts(
                total=self.total, completed=self.completed, failed=self.failed
            ),
            metadata=self.metadata,
        )


class Line(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in its input file."""

    number: int
    start: int
    length: int
    custom_id: str
    losses: int = 0
    """The number of times that the engine died while it was answered."""


_MAKE_ROOM = (
    "DELETE FROM batches WHERE owner = ? AND NOT is_open AND rowid <= (SELECT rowid FROM batches"
    " WHERE owner = ? AND NOT is_open ORDER BY rowid DESC LIMIT 1 OFFSET ?)"
)
_decode = msgspec.json.Decoder(Batch).decode


class Batches:
    """The batches in the database.

    Args:
        max_ended: batches of one key that are kept once they have ended; the oldest make room.
    """

    def __init__(self, database: Database, max_ended: int) -> None:
        self._database = database
        self._max_ended = max_ended

    async def save(self, batch: Batch) -> None:
        """Keeps the batch as it is now."""

        def write(connection: sqlite3.Connection) -> None:
            save(connection, batch)
            connection.execute(_MAKE_ROOM, (batch.owner, batch.owner, self._max_ended))

        await self._database.run(write)

    async def get(self, owner: str, batch_id: str, prefix: str = PREFIX) -> Batch:
        """`prefix`: what the id of a batch of the wanted kind begins with. Raises
        BatchNotKnownError."""
        query = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        row = await self._database.run(lambda c: c.execute(query, (batch_id, owner)).fetchone())
        if row is None or not batch_id.startswith(prefix):
            raise BatchNotKnownError(
                f"this key has no batch {shown(batch_id)} here: list those that it has"
            )
        return _decode(row[0])

    async def open_ones(self) -> list[Batch]:
        """All that have not ended, the oldest first, with counts of the lines that are done."""

        def read(connection: sqlite3.Connection) -> list[Batch]:
            query = "SELECT record FROM batches WHERE is_open ORDER BY rowid"
            found = [_decode(row[0]) for row in connection.execute(query)]
            for batch in found:
                batch.completed = _count(connection, batch.id, LineState.ANSWERED)
                batch.failed = _count(connection, batch.id, LineState.FAILED)
            return found

        return await self._database.run(read)

    async def page(
        self,
        owner: str,
        after: str | None,
        limit: int,
        prefix: str = PREFIX,
        before: str | None = None,
    ) -> tuple[list[Batch], bool]:
        """A page of those whose ids begin with `prefix`, the newest first, behind `after` or next
        in front of `before`, and whether more follow."""
        query, values = "SELECT record FROM batches WHERE owner = ? AND id GLOB ?", [owner]
        values.append(prefix + "*")
        if after is not None:
            query += " AND rowid < (SELECT rowid FROM batches WHERE id = ? AND owner = ?)"
            values += [after, owner]
        elif before is not None:
            query += " AND rowid > (SELECT rowid FROM batches WHERE id = ? AND owner = ?)"
            values += [before, owner]
        order = "DESC" if before is None else "ASC"
        query += f" ORDER BY rowid {order} LIMIT {limit + 1:d}"
        rows = await self._database.run(lambda c: c.execute(query, values).fetchall())
        found = [_decode(row[0]) for row in rows[:limit]]
        return found if before is None else found[::-1], len(rows) > limit

    async def delete(self, batch_id: str) -> None:
        """Deletes a batch that has ended."""
        query = "DELETE FROM batches WHERE id = ? AND NOT is_open"
        await self._database.run(lambda c: c.execute(query, (batch_id,)))

    async def forget_before(self, created: int) -> None:
        """Forgets batches that have ended and were made before `created`."""
        query = "DELETE FROM batches WHERE NOT is_open AND created < ?"
        await self._database.run(lambda c: c.execute(query, (created,)))

    # --- lines ------------------------------------------------------------------------------------
    async def begin_lines(self, batch_id: str) -> None:
        """Deletes the lines that a validation which did not end has left."""
        query = "DELETE FROM lines WHERE batch = ?"
        await self._database.run(lambda c: c.execute(query, (batch_id,)))

    async def add_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Lines that wait."""
        query = "INSERT INTO lines (batch, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)"
        rows = [(batch_id, each.number, each.start, each.length, each.custom_id) for each in lines]
        await self._database.run(lambda c: c.executemany(query, rows))

    async def waiting(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Lines that wait, from the line after `after`."""
        query = (
            "SELECT number, start, length, custom_id, losses FROM lines WHERE batch = ? AND"
            " state = 0 AND number > ? ORDER BY number LIMIT ?"
        )
        rows = await self._database.run(
            lambda c: c.execute(query, (batch_id, after, limit)).fetchall()
        )
        return [Line(*row) for row in rows]

    async def num_waiting(self, batch_id: str) -> int:
        """The number of lines without an answer."""
        return await self._database.run(lambda c: _count(c, batch_id, LineState.WAITS))

    async def add_answers(self, answers: Iterable[tuple[str, int, LineState, bytes]]) -> None:
        """(batch, line, how it ended, its line of the output). A line that has one keeps it."""
        query = (
            "UPDATE lines SET state = ?, answer = ? WHERE batch = ? AND number = ? AND state = 0"
        )
        rows = [(int(state), answer, batch, line) for batch, line, state, answer in answers]
        await self._database.run(lambda c: c.executemany(query, rows))

    async def count_loss(self, batch_id: str, number: int) -> None:
        """The engine died while this line was answered."""
        query = "UPDATE lines SET losses = losses + 1 WHERE batch = ? AND number = ?"
        await self._database.run(lambda c: c.execute(query, (batch_id, number)))

    async def answers(
        self, batch_id: str, state: LineState, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """(line, its line of the output), in their order."""
        query = (
            "SELECT number, answer FROM lines WHERE batch = ? AND state = ? AND number > ?"
            " ORDER BY number LIMIT ?"
        )
        values = (batch_id, int(state), after, limit)
        return await self._database.run(lambda c: c.execute(query, values).fetchall())


def save(connection: sqlite3.Connection, batch: Batch) -> None:
    """Writes the batch; one that has ended loses its lines, whose answers are in its files."""
    connection.execute(
        "INSERT INTO batches (id, owner, created, is_open, record) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET is_open = excluded.is_open, record = excluded.record",
        (batch.id, batch.owner, batch.created_at, batch.is_open, encode(batch)),
    )
    if not batch.is_open:
        connection.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))


def _count(connection: sqlite3.Connection, batch_id: str, state: LineState) -> int:
    query = "SELECT count(*) FROM lines WHERE batch = ? AND state = ?"
    (found,) = connection.execute(query, (batch_id, int(state))).fetchone()
    return int(found)
