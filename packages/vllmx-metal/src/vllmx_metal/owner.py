"""The one thread that touches MLX. Its default streams belong to a thread: an array that was not
computed yet can be used in the thread that asked for it and in no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import mlx.core as mx

Value = TypeVar("Value")


class Owner:
    """Runs functions one after the other in a thread of its own. A process may end without it: MLX
    can wait for ever for ranks that are gone."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """The calls to run; None: no more will come."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vllmx-mlx", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Value]) -> Future[Value]:
        """Runs it after all that was submitted before, and does not wait."""
        found: Future[Value] = Future()

        def work() -> None:
            try:
                found.set_result(function())
            except BaseException as error:  # whatever it is, who waits gets it
                found.set_exception(error)

        assert not self._closed, "the owner is closed"
        self._work.put(work)
        return found

    def call(self, function: Callable[[], Value]) -> Value:
        """Runs it and waits for what it returns or raises."""
        return self.submit(function).result()

    def close(self) -> None:
        """Ends the thread after all that was submitted, and gives MLX's kept memory back. May be
        called twice."""
        if self._closed:
            return
        self.submit(_end_of_thread)
        self._closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and what it holds, before the next one comes


def _end_of_thread() -> None:
    mx.clear_cache()
    mx.clear_streams()  # each has a thread of its own
