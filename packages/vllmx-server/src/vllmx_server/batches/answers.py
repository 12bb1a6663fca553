"""Answers on their way into the database, all that came meanwhile in one transaction."""

from __future__ import annotations

import asyncio

from vllmx_server.store.batches import Batches, LineState

Item = tuple[str, int, LineState, bytes]


class AnswerWriter:
    """Writes answers together: while some are being written, others gather."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._items: list[Item] = []
        self._writing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def write(self, item: Item) -> None:
        """Returns when it is kept; cancelling does not take it back. Raises StorageError."""
        self._items.append(item)
        if self._next is None:
            self._next = asyncio.ensure_future(self._flush(self._writing))
            self._next.add_done_callback(_retrieve)
        await asyncio.shield(self._next)

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        items, self._items = self._items, []
        self._writing, self._next = self._next, None
        await self._batches.add_answers(items)


def _retrieve(task: asyncio.Task[None]) -> None:
    """An error that all who waited for it have left is not reported."""
    if not task.cancelled():
        task.exception()
