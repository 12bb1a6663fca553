"""Stored responses."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllmx_core.errors import InvalidRequestError, VllmxError, shown

from vllmx_server.apis.responses.conversation_store import Conversations
from vllmx_server.apis.responses.schema import InputItem
from vllmx_server.config import ServerConfig
from vllmx_server.schema.record import encode
from vllmx_server.store.database import Database, now

if TYPE_CHECKING:
    from vllmx_server.mcp.servers import ToolServers


MAX_EVENTS_BYTES = 32 << 20
"""The events of a longer stream are not kept."""
MAX_CHAIN = 1000
"""Responses that may follow one on another."""


class ResponseNotKnownError(VllmxError):
    """Says that there is no such response, or that it is another key's."""

    http_status = 404
    code = "response_not_found"


class StoredResponse(msgspec.Struct, kw_only=True):
    """A response with what it was made of."""

    response: dict[str, Any]
    """The response in the form of the API."""
    input: list[InputItem]
    """The input items of its own request, with ids."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def is_open(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    def items(self) -> list[InputItem]:
        """The items that it adds to a conversation."""
        return [*self.input, *msgspec.convert(self.response["output"], list[InputItem])]


_decode = msgspec.json.Decoder(StoredResponse).decode


class Responses:
    """The responses in the database.

    Args:
        max_bytes_of_owner: of one key; the oldest make room.
        lifetime_s: how long one is kept.
    """

    def __init__(self, database: Database, max_bytes_of_owner: int, lifetime_s: int) -> None:
        self._database = database
        self._max_bytes = max_bytes_of_owner
        self._lifetime_s = lifetime_s

    async def save(self, owner: str, stored: StoredResponse, events: Sequence[bytes] = ()) -> None:
        """Keeps it as it is now, with its events where there are some, unless those have over
        `MAX_EVENTS_BYTES`; the oldest ones of the key make room."""

        def write(connection: sqlite3.Connection) -> None:
            data, created = encode(stored), now()
            told = zlib.compress(b"".join(events), 1) if _are_few(events) else b""
            if len(data) + len(told) > self._max_bytes:
                told = b""  # they would push out the response itself
            connection.execute(
                "INSERT INTO responses (id, owner, created, expires, is_open, bytes, record)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " is_open = excluded.is_open, bytes = excluded.bytes, record = excluded.record",
                (
                    stored.id,
                    owner,
                    created,
                    created + self._lifetime_s,
                    stored.is_open,
                    len(data) + len(told),
                    data,
                ),
            )
            if told:
                query = "INSERT OR REPLACE INTO events (response, data) VALUES (?, ?)"
                connection.execute(query, (stored.id, told))
            _make_room(connection, owner, self._max_bytes)

        await self._database.run(write)

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotKnownError."""
        row = await self._database.run(lambda c: _row(c, owner, response_id))
        if row is None:
            raise _not_known(response_id)
        return _decode(row)

    async def events(self, response_id: str, after: int) -> bytes | None:
        """The events of one that was found, behind number `after`; None where none were kept."""

        def read(connection: sqlite3.Connection) -> bytes | None:
            query = "SELECT data FROM events WHERE response = ?"
            row = connection.execute(query, (response_id,)).fetchone()
            return None if row is None else _behind(zlib.decompress(row[0]), after)

        return await self._database.run(read)

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises ResponseNotKnownError."""

        def forget(connection: sqlite3.Connection) -> None:
            if _row(connection, owner, response_id) is None:
                raise _not_known(response_id)
            connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))

        await self._database.run(forget)

    async def conversation(
        self, owner: str, response_id: str, max_items: int, max_bytes: int
    ) -> tuple[list[InputItem], int]:
        """All that was said up to a response, and how many bytes were read for it. Raises
        ResponseNotKnownError, InvalidRequestError."""

        def read(connection: sqlite3.Connection) -> tuple[list[InputItem], int]:
            turns: list[list[InputItem]] = []
            next_id: str | None = response_id
            num_items = num_bytes = 0
            while next_id is not None:
                row = _row(connection, owner, next_id)
                if row is None:
                    raise _not_known(next_id, "previous_response_id")
                num_bytes += len(row)
                stored = _decode(row)
                if stored.is_open:
                    raise _unusable(f"{shown(next_id)} has not ended yet: wait for it")
                if found := stored.response.get("conversation"):
                    raise _unusable(
                        f"{shown(next_id)} is one turn of conversation {found['id']}: go on with"
                        " the conversation"
                    )
                turns.append(stored.items())
                num_items += len(turns[-1])
                if len(turns) > MAX_CHAIN or num_items > max_items or num_bytes > max_bytes:
                    raise _unusable(
                        f"the conversation before it has over {MAX_CHAIN} responses, {max_items}"
                        f" items or {max_bytes} bytes: begin a new one with what matters of it"
                    )
                next_id = stored.response.get("previous_response_id")
            return [item for turn in reversed(turns) for item in turn], num_bytes

        return await self._database.run(read)

    async def end_open_ones(self, end: Callable[[StoredResponse], None]) -> None:
        """Changes those that an earlier server left open by `end`."""

        def change(connection: sqlite3.Connection) -> None:
            query = "SELECT record FROM responses WHERE is_open"
            for (record,) in connection.execute(query).fetchall():
                stored = _decode(record)
                end(stored)
                connection.execute(
                    "UPDATE responses SET is_open = ?, record = ? WHERE id = ?",
                    (stored.is_open, encode(stored), stored.id),
                )

        await self._database.run(change)

    async def clean(self) -> None:
        """Forgets what has expired."""
        query = "DELETE FROM responses WHERE expires <= ?"
        await self._database.run(lambda c: c.execute(query, (now(),)))


def _are_few(events: Sequence[bytes]) -> bool:
    return 0 < sum(map(len, events)) <= MAX_EVENTS_BYTES


def _behind(events: bytes, after: int) -> bytes:
    """The events behind number `after`; the first one is number 0."""
    start = 0
    for _ in range(after + 1):
        end = events.find(b"\n\n", start)
        if end < 0:
            return b""
        start = end + 2
    return events[start:]


def _row(connection: sqlite3.Connection, owner: str, response_id: str) -> bytes | None:
    query = "SELECT record FROM responses WHERE id = ? AND owner = ? AND expires > ?"
    row = connection.execute(query, (response_id, owner, now())).fetchone()
    return None if row is None else row[0]


def _make_room(connection: sqlite3.Connection, owner: str, max_bytes: int) -> None:
    query = "SELECT coalesce(sum(bytes), 0) FROM responses WHERE owner = ?"
    (size,) = connection.execute(query, (owner,)).fetchone()
    if size <= max_bytes:
        return
    oldest = "SELECT id, bytes FROM responses WHERE owner = ? ORDER BY rowid"
    for response_id, num_bytes in connection.execute(oldest, (owner,)).fetchall():
        if size <= max_bytes:
            break
        connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        size -= num_bytes


def _not_known(response_id: str, param: str | None = None) -> ResponseNotKnownError:
    return ResponseNotKnownError(
        f"there is no response {shown(response_id)} of this key: it was not stored, or was deleted"
        " or is too old",
        param=param,
    )


def _unusable(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"previous_response_id: {text}", param="previous_response_id")


class KeptResponses:
    """Responses and conversations in one database.

    Attributes:
        tool_servers: MCP servers of the operator; None: there are none.
    """

    def __init__(self, config: ServerConfig, database: Database) -> None:
        most, lifetime_s = config.max_stored_bytes, config.lifetime_s
        self.responses = Responses(database, most, lifetime_s)
        self.conversations = Conversations(database, most, lifetime_s)
        self.tool_servers: ToolServers | None = None

    async def clean(self) -> None:
        """Deletes what is too old."""
        await self.responses.clean()
        await self.conversations.clean()
