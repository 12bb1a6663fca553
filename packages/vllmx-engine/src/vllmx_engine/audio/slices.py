"""Long work in slices: clients take turns, and the work of a client that left ends."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from vllmx_core.errors import EngineDeadError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Sliced = Generator[None, None, T]
"""Work that yields behind each slice of some tens of milliseconds, and returns its result."""

_THREADS = 2


def finished(work: Sliced[T]) -> T:
    """Returns the result of all slices, computed here."""
    while (end := _next_slice(work)) is None:
        pass
    return end[0]


def _next_slice(work: Sliced[T]) -> tuple[T] | None:
    """(the result,) behind the last slice."""
    try:
        next(work)
    except StopIteration as end:
        return (end.value,)
    return None


class SliceThreads:
    """Computes slices on two threads. A client has one slice there at a time, and those of all
    clients are computed in the order of their arrival: an hour of audio, or many of them, delays
    the audio of others by a slice each time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "vllmx-slices")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held for the slice of a client; kept while any of its work waits."""
        self._closed = False

    async def run(self, client: str, work: Sliced[T]) -> T:
        """Returns or raises the result of `work`. Cancelling ends it behind the slice at hand.
        Raises EngineDeadError once closed."""
        import asyncio  # `LLM` starts without it

        turn = self._turns.setdefault(client, asyncio.Lock())
        loop = asyncio.get_running_loop()
        while True:
            async with turn:
                if self._closed:
                    raise EngineDeadError("the engine is closed: load the model again")
                end = await loop.run_in_executor(self._threads, _next_slice, work)
            if end is not None:
                return end[0]

    def close(self) -> None:
        """Drops the slices that wait for a thread; none begins any more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
