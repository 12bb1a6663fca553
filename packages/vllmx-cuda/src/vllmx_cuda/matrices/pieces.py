"""Weights on their way through pinned buffers, a run of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllmx_cuda.device import Bytes, Memory

PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What fills a pinned buffer, and where the buffer goes."""

    target: Memory
    fill: Callable[[Bytes], object]
    """Called on some thread; gets a buffer of `num_bytes`."""
    more: tuple[Memory, ...] = ()
    """Where the rest of the buffer goes, for what is made together (codes and their scales)."""

    @property
    def targets(self) -> tuple[Memory, ...]:
        """In the order in which they lie in the buffer."""
        return (self.target, *self.more)

    @property
    def num_bytes(self) -> int:
        return sum(target.num_bytes for target in self.targets)


def row_pieces(
    rows: int, target: Memory, fill: Callable[[Bytes, int, int], object]
) -> Iterator[Piece]:
    """`rows` rows of equal size that fill `target`, in pieces of whole rows.

    Args:
        fill: fill(buffer, begin, end) writes rows from `begin` to before `end`.
    """
    row_bytes = target.num_bytes // rows
    most = max(1, PIECE_BYTES // max(1, row_bytes))
    for begin in range(0, rows, most):
        end = min(rows, begin + most)
        span = target.at(begin * row_bytes, (end - begin) * row_bytes)
        yield Piece(span, lambda buffer, begin=begin, end=end: fill(buffer, begin, end))  # type: ignore[misc]
