"""Values in the order of a number, for queues from whose middle values are taken out too."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class Ordered(Generic[V]):
    """Values by whole numbers, of which each is there at most once.

    A heap of the numbers beside a dictionary: whoever is taken out from the middle stays in the
    heap until it comes to the front, or until half of the heap is like it. So no operation but
    iterating looks at more than the logarithm of them all, on average.
    """

    __slots__ = ("_heap", "_values")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._values: dict[int, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def __iter__(self) -> Iterator[V]:
        """Yields the values in no order."""
        return iter(self._values.values())

    def get(self, number: int) -> V | None:
        return self._values.get(number)

    def add(self, number: int, value: V) -> None:
        """Puts a value in its place."""
        assert number not in self._values, number
        self._values[number] = value
        heapq.heappush(self._heap, number)

    def pop(self, number: int) -> V:
        """Takes a value out, wherever it stands."""
        value = self._values.pop(number)
        if len(self._heap) > 2 * len(self._values) + 16:
            self._heap = list(self._values)
            heapq.heapify(self._heap)
        return value

    def least(self) -> int:
        """The smallest number; there must be one."""
        heap = self._heap
        while heap[0] not in self._values:
            heapq.heappop(heap)
        return heap[0]

    def first(self) -> V:
        """The value of the smallest number; there must be one."""
        return self._values[self.least()]
