"""Weights on their way through pinned buffers, a run of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllmx_core.errors import VllmxError

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs import Variant

PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes as the checkpoint has them, which a kernel on the device puts into their order."""

    num_bytes: int
    kernel: Variant
    launch: Callable[[Device, Memory, Memory], object]
    """launch(device, stored, fault) enqueues it; it raises the u32 at `fault` above 0 where it
    finds what cannot be."""
    refusal: Callable[[int], VllmxError]
    """The error of a `fault` above 0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of a pinned buffer, and its target."""

    target: Memory
    fill: Callable[[Bytes], object]
    """Called on some thread; gets a buffer of `num_bytes`."""
    more: tuple[Memory, ...] = ()
    """The memory where the rest of the buffer goes, for what is made together (codes and their
    scales)."""
    stored: Stored | None = None
    """The buffer's content where the target's is made of it on the device."""

    @property
    def targets(self) -> tuple[Memory, ...]:
        """The memory that a piece is copied to, in the order in which it lies in the buffer."""
        return (self.target, *self.more)

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        if self.stored is not None:
            return self.stored.num_bytes
        return sum(target.num_bytes for target in self.targets)


def row_pieces(
    rows: int, target: Memory, fill: Callable[[Bytes, int, int], object]
) -> Iterator[Piece]:
    """`rows` rows of equal size that fill `target`, in pieces of whole rows.

    Args:
        fill: fill(buffer, begin, end) writes rows from `begin` to before `end`.
    """
    for begin, end, span in runs_of_rows(rows, target):
        yield Piece(span, lambda buffer, begin=begin, end=end: fill(buffer, begin, end))  # type: ignore[misc]


def runs_of_rows(
    rows: int, target: Memory, buffer_bytes: int | None = None
) -> Iterator[tuple[int, int, Memory]]:
    """(begin, end, where they lie) of runs of rows of equal size that fill `target`.

    Args:
        buffer_bytes: of all rows in the pinned buffers; as many as of the target by default.
    """
    row_bytes = target.num_bytes // rows
    most = max(1, PIECE_BYTES * rows // max(1, buffer_bytes or target.num_bytes))
    for begin in range(0, rows, most):
        end = min(rows, begin + most)
        yield begin, end, target.at(begin * row_bytes, (end - begin) * row_bytes)
