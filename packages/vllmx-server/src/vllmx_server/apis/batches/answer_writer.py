"""Answers on their way into the database, all that came meanwhile in one transaction."""

from __future__ import annotations

import asyncio

from vllmx_server.apis.batches.store import Batches, LineState

Item = tuple[str, int, LineState, bytes]
_GATHER_S = 0.05
"""How long answers wait for others: a transaction costs as much as a part of each."""


class AnswerWriter:
    """Writes answers together: they gather for a moment, and while others are being written."""

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

    async def finish(self) -> None:
        """Returns when all is kept that can be, whether or not anybody waits for it."""
        under_way = [task for task in (self._writing, self._next) if task is not None]
        if under_way:
            await asyncio.wait(under_way)

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        await asyncio.sleep(_GATHER_S)
        if before is not None:
            await asyncio.wait((before,))
        items, self._items = self._items, []
        self._writing, self._next = self._next, None
        await self._batches.add_answers(items)


def _retrieve(task: asyncio.Task[None]) -> None:
    """An error that all who waited for it have left is not reported."""
    if not task.cancelled():
        task.exception()
