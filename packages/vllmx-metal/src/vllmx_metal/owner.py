"""The one thread that touches MLX. Its default streams belong to a thread: an array that was not
computed yet can be used in the thread that asked for it and in no other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx

Value = TypeVar("Value")


class Owner:
    """Runs functions one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="vllmx-mlx")

    def submit(self, function: Callable[[], Value]) -> Future[Value]:
        """Runs it after all that was submitted before, and does not wait."""
        return self._executor.submit(function)

    def call(self, function: Callable[[], Value]) -> Value:
        """Runs it and waits for what it returns or raises."""
        return self._executor.submit(function).result()

    def close(self) -> None:
        """Ends the thread after all that was submitted, and gives MLX's kept memory back. May be
        called twice."""
        try:
            self._executor.submit(_end_of_thread)
        except RuntimeError:
            return  # closed before
        self._executor.shutdown(wait=True)


def _end_of_thread() -> None:
    mx.clear_cache()
    mx.clear_streams()  # each has a thread of its own
