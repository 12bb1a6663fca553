"""Stored conversations and their items."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

import msgspec
from vllmx_core.errors import InvalidRequestError, VllmxError, shown

from vllmx_server.apis.responses.answers import ConversationObject
from vllmx_server.apis.responses.items import new_item_id
from vllmx_server.apis.responses.schema import InputItem
from vllmx_server.generating.chat_body import MAX_MESSAGES
from vllmx_server.schema.record import encode
from vllmx_server.store.database import Database, now

MAX_ITEMS = MAX_MESSAGES
"""Items of one conversation, which a response must read in one go."""
_OVERHEAD = 1024
"""The bytes that a conversation counts besides its items, so that empty ones count, too."""
_ITEM_OVERHEAD = 64
_IN_A_PATH = re.compile(r"(?=.*[^.])[^/]+", re.DOTALL)
"""Ids by which an item can be retrieved and deleted: a slash divides, dots lead elsewhere."""
_decode_item = msgspec.json.Decoder(InputItem).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


class ConversationNotKnownError(VllmxError):
    """The conversation does not exist, or belongs to another key."""

    http_status = 404
    code = "conversation_not_found"


class ItemNotKnownError(VllmxError):
    """The conversation has no item of this id."""

    http_status = 404
    code = "item_not_found"


class Conversations:
    """The conversations in the database.

    Args:
        max_bytes_of_owner: of all conversations of one key; those that were not used for the
            longest time make room.
        lifetime_s: how long a conversation is kept after its last change.
    """

    def __init__(self, database: Database, max_bytes_of_owner: int, lifetime_s: int) -> None:
        self._database = database
        self._max_bytes = max_bytes_of_owner
        self._lifetime_s = lifetime_s

    async def create(
        self, owner: str, found: ConversationObject, items: Sequence[InputItem]
    ) -> None:
        """Keeps a new conversation. Raises InvalidRequestError for too many bytes."""

        def insert(connection: sqlite3.Connection) -> None:
            metadata = encode(found.metadata)
            connection.execute(
                "INSERT INTO conversations (id, owner, created, used, bytes, metadata)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (found.id, owner, found.created_at, now(), _OVERHEAD + len(metadata), metadata),
            )
            self._add(connection, owner, found.id, items, 0)

        await self._database.run(insert)

    async def get(self, owner: str, conversation_id: str) -> ConversationObject:
        """Raises ConversationNotKnownError."""
        return await self._database.run(lambda c: self._get(c, owner, conversation_id))

    async def update(
        self, owner: str, conversation_id: str, metadata: dict[str, str]
    ) -> ConversationObject:
        """Replaces the metadata. Raises ConversationNotKnownError."""

        def write(connection: sqlite3.Connection) -> ConversationObject:
            before = self._get(connection, owner, conversation_id)
            data = encode(metadata)
            connection.execute(
                "UPDATE conversations SET metadata = ?, used = ?, bytes = bytes + ? WHERE id = ?",
                (data, now(), len(data) - len(encode(before.metadata)), conversation_id),
            )
            self._make_room(connection, owner, conversation_id)
            return self._get(connection, owner, conversation_id)

        return await self._database.run(write)

    async def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes the conversation with its items. Raises ConversationNotKnownError."""

        def forget(connection: sqlite3.Connection) -> None:
            self._get(connection, owner, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._database.run(forget)

    async def add(
        self, owner: str, conversation_id: str, items: Sequence[InputItem], spare: int = 0
    ) -> list[InputItem]:
        """Appends items, all or none, and returns them with their ids. `spare`: how many items over
        MAX_ITEMS are allowed. Raises ConversationNotKnownError, and InvalidRequestError for too
        many."""

        def insert(connection: sqlite3.Connection) -> list[InputItem]:
            self._get(connection, owner, conversation_id)
            return self._add(connection, owner, conversation_id, items, spare)

        return await self._database.run(insert)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> InputItem:
        """Raises ConversationNotKnownError, ItemNotKnownError."""

        def read(connection: sqlite3.Connection) -> InputItem:
            self._get(connection, owner, conversation_id)
            return _decode_item(_item(connection, conversation_id, item_id))

        return await self._database.run(read)

    async def delete_item(
        self, owner: str, conversation_id: str, item_id: str
    ) -> ConversationObject:
        """Deletes an item and returns its conversation. Raises ConversationNotKnownError,
        ItemNotKnownError."""

        def forget(connection: sqlite3.Connection) -> ConversationObject:
            found = self._get(connection, owner, conversation_id)
            size = len(_item(connection, conversation_id, item_id)) + _ITEM_OVERHEAD
            connection.execute(
                "DELETE FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id)
            )
            connection.execute(
                "UPDATE conversations SET bytes = bytes - ?, used = ? WHERE id = ?",
                (size, now(), conversation_id),
            )
            return found

        return await self._database.run(forget)

    async def page(
        self,
        owner: str,
        conversation_id: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        max_bytes: int,
        param: str | None = None,
    ) -> tuple[list[InputItem], bool, int]:
        """A page of items, whether more follow, and the bytes of the page, which ends at the item
        that brings it to `max_bytes`. Raises ConversationNotKnownError, whose param is `param`."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        query = "SELECT record FROM items WHERE conversation = ?"
        values = [conversation_id]
        if after is not None:
            place = "(SELECT number FROM items WHERE conversation = ? AND id = ?)"
            query += f" AND number {sign} {place}"
            values += [conversation_id, after]
        query += f" ORDER BY number {order} LIMIT {limit + 1:d}"

        def read(connection: sqlite3.Connection) -> tuple[list[InputItem], bool, int]:
            self._get(connection, owner, conversation_id, param)
            found: list[InputItem] = []
            num_bytes = 0
            for (record,) in connection.execute(query, values):
                if len(found) == limit or num_bytes >= max_bytes:
                    return found, True, num_bytes
                found.append(_decode_item(record))
                num_bytes += len(record)
            return found, False, num_bytes

        return await self._database.run(read)

    async def items(
        self, owner: str, conversation_id: str, max_bytes: int
    ) -> tuple[list[InputItem], int]:
        """All items, the oldest first, and their bytes. Raises ConversationNotKnownError, and
        InvalidRequestError for more than a response can read."""

        found, has_more, num_bytes = await self.page(
            owner, conversation_id, None, MAX_ITEMS, False, max_bytes, "conversation"
        )
        if has_more or num_bytes > max_bytes:
            raise InvalidRequestError(
                f"conversation: {shown(conversation_id)} has over {MAX_ITEMS} items or"
                f" {max_bytes} bytes: begin a new one with the items that still matter",
                param="conversation",
            )
        return found, num_bytes

    async def clean(self) -> None:
        """Deletes conversations unchanged for `lifetime_s`."""
        query = "DELETE FROM conversations WHERE used <= ?"
        await self._database.run(lambda c: c.execute(query, (now() - self._lifetime_s,)))

    # --- within one transaction -------------------------------------------------------------------
    def _get(
        self,
        connection: sqlite3.Connection,
        owner: str,
        conversation_id: str,
        param: str | None = None,
    ) -> ConversationObject:
        query = (
            "SELECT created, metadata FROM conversations WHERE id = ? AND owner = ? AND used > ?"
        )
        values = (conversation_id, owner, now() - self._lifetime_s)
        row = connection.execute(query, values).fetchone()
        if row is None:
            raise ConversationNotKnownError(
                f"this key has no conversation {shown(conversation_id)}: it was never created, was"
                " deleted, or is too old",
                param=param,
            )
        metadata = _decode_metadata(row[1])
        return ConversationObject(id=conversation_id, created_at=row[0], metadata=metadata)

    def _add(
        self,
        connection: sqlite3.Connection,
        owner: str,
        conversation_id: str,
        items: Sequence[InputItem],
        spare: int,
    ) -> list[InputItem]:
        """An item whose id another one has, or no path can name, gets a new one."""
        query = "SELECT id FROM items WHERE conversation = ?"
        taken = {row[0] for row in connection.execute(query, (conversation_id,))}
        if len(taken) + len(items) > MAX_ITEMS + spare:
            raise InvalidRequestError(
                f"the conversation has {len(taken)} items, and {len(items)} more are over the limit"
                f" of {MAX_ITEMS}: begin a new one with the items that still matter",
                param="items",
            )
        kept = []
        for item in items:
            if item.id in taken or not _IN_A_PATH.fullmatch(item.id or ""):
                item = msgspec.structs.replace(item, id=new_item_id(item))
            taken.add(item.id)
            kept.append(item)
        rows = [(conversation_id, item.id, encode(item)) for item in kept]
        connection.executemany(
            "INSERT INTO items (conversation, id, record) VALUES (?, ?, ?)", rows
        )
        connection.execute(
            "UPDATE conversations SET used = ?, bytes = bytes + ? WHERE id = ?",
            (now(), sum(_ITEM_OVERHEAD + len(record) for _, _, record in rows), conversation_id),
        )
        self._make_room(connection, owner, conversation_id)
        return kept

    def _make_room(self, connection: sqlite3.Connection, owner: str, keep: str) -> None:
        """Deletes the owner's least recently changed conversations, except `keep`, until the rest
        fits. Raises InvalidRequestError if `keep` alone is too large."""
        query = "SELECT coalesce(sum(bytes), 0) FROM conversations WHERE owner = ?"
        (size,) = connection.execute(query, (owner,)).fetchone()
        if size <= self._max_bytes:
            return
        query = (
            "SELECT id, bytes FROM conversations WHERE owner = ? AND id != ? ORDER BY used, rowid"
        )
        for other, num_bytes in connection.execute(query, (owner, keep)).fetchall():
            if size <= self._max_bytes:
                return
            connection.execute("DELETE FROM conversations WHERE id = ?", (other,))
            size -= num_bytes
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"the conversation has {size} bytes with this, at most {self._max_bytes} are kept"
                " for a key: begin a new one, or raise --max-stored-bytes",
                param="items",
            )


def _item(connection: sqlite3.Connection, conversation_id: str, item_id: str) -> bytes:
    query = "SELECT record FROM items WHERE conversation = ? AND id = ?"
    row = connection.execute(query, (conversation_id, item_id)).fetchone()
    if row is None:
        raise ItemNotKnownError(
            f"conversation {conversation_id} has no item {shown(item_id)}: GET its items lists them"
        )
    found: bytes = row[0]
    return found
