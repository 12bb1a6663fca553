"""Places frames in a ring of bytes until all readers have taken them."""

from __future__ import annotations

from collections import deque

_ALIGNMENT = 64


class Ring:
    """Places for frames, which are taken in the order in which they were placed.

    Args:
        size: bytes of the ring.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._frames: deque[tuple[int, int]] = deque()
        """(begin, end) of those that not all have taken, the oldest first."""
        self._num_released = 0

    def fits(self, size: int) -> bool:
        """Whether there will be a place for a frame of that size, once enough was taken."""
        return size <= self._size // 2

    def release(self, num_taken: int) -> None:
        """All readers have taken so many frames since the beginning."""
        while self._frames and self._num_released < num_taken:
            self._frames.popleft()
            self._num_released += 1

    def place(self, size: int) -> int | None:
        """The first byte of a frame, which counts as placed; None while there is no room. An empty
        ring begins anew, with what lies in the caches."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        begin: int | None = 0
        if self._frames:
            oldest, newest = self._frames[0][0], self._frames[-1][1]
            if newest <= oldest:  # it has begun from the front
                begin = newest if newest + size < oldest else None
            elif newest + size <= self._size:
                begin = newest
            else:
                begin = 0 if size < oldest else None
        if begin is not None:
            self._frames.append((begin, begin + size))
        return begin
