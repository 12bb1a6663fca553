"""Rows of integers as a checkpoint stores them, on their way to the kernel that puts them into the
order of `kernels/w4_codes.h`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from vllmx_core.errors import VllmxError

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.w4 import TILE_ROWS
from vllmx_cuda.matrices.pieces import Piece, Stored, runs_of_rows


class StoredRows(Protocol):
    """A part, and what the kernel wants of it."""

    @property
    def tile_bytes(self) -> int:
        """Stored bytes of 16 rows."""
        ...

    @property
    def kernel(self) -> Variant: ...

    def fill(self, begin: int, end: int, buffer: Bytes) -> None:
        """Copies these rows as they are."""
        ...

    def launch(
        self, tiles: Memory, rows: int, device: Device, stored: Memory, fault: Memory
    ) -> None:
        """Enqueues the product of so many rows; see `Stored.launch`."""
        ...

    def refusal(self, fault: int) -> VllmxError:
        """See `Stored.refusal`."""
        ...


def stored_pieces(part: StoredRows, rows: int, tiles: Memory) -> Iterator[Piece]:
    """Uploads of all `rows` rows of a part, which become `tiles`."""
    count = rows // TILE_ROWS
    for first, last, span in runs_of_rows(count, tiles, count * part.tile_bytes):
        begin, end = first * TILE_ROWS, last * TILE_ROWS
        launch = partial(part.launch, span, end - begin)
        stored = Stored((last - first) * part.tile_bytes, part.kernel, launch, part.refusal)
        yield Piece(span, partial(part.fill, begin, end), stored=stored)
