"""Values in the order of a number, for queues from whose middle values are taken out too."""

from __future__ import annotations

import heapq
from typing import TypeVar

V = TypeVar("V")


class Ordered(dict[int, V]):
    """Values by whole numbers, of which each is there at most once: a dictionary that is changed
    by `add` and `take` alone.

    A heap of the numbers beside the dictionary: whoever is taken out from the middle stays in the
    heap until it comes to the front, or until half of the heap is like it. So no operation but
    iterating looks at more than the logarithm of them all, on average.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[int] = []

    def add(self, number: int, value: V) -> None:
        """Puts a value in its place."""
        assert number not in self, number
        self[number] = value
        heapq.heappush(self._heap, number)

    def take(self, number: int) -> V:
        """Takes a value out, wherever it stands."""
        value = self.pop(number)
        if len(self._heap) > 2 * len(self) + 16:
            self._heap = list(self)
            heapq.heapify(self._heap)
        return value

    def least(self) -> int:
        """The smallest number; there must be one."""
        heap = self._heap
        while heap[0] not in self:
            heapq.heappop(heap)
        return heap[0]

    def first(self) -> V:
        """The value of the smallest number; there must be one."""
        return self[self.least()]
