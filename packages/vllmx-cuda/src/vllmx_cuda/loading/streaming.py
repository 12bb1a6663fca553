"""Pieces of weights on their way to the device, through a ring of pinned buffers.

Threads fill the buffers ahead of the copies, which run in the order of the pieces. What a kernel
puts into its order goes to one buffer on the device first: copies and kernels are on one stream, so
the next piece comes when the kernel of the one before it has run. That takes a tenth of the time of
the copy or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from vllmx_core.system.processors import available_processors
from vllmx_core.system.progress import show_progress

from vllmx_cuda.device.device import Device, Event
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.matrices.pieces import Piece

PIECES_IN_FLIGHT = 4
"""The least number of pieces in flight; as many as there are cores to fill them, up to the next."""
MOST_IN_FLIGHT = 12
"""A core copies some GB/s out of the mapped file, and makes 0.2 GB/s of what only the host can put
into its order; a GPU takes 25 GB/s and more."""
_WORD_BYTES = 4


def stream(
    pieces: Sequence[Piece], device: Device, staging: Memory, *, progress: bool = False
) -> None:
    """Returns when all targets are written.

    Args:
        staging: enough for the greatest of the pieces that a kernel puts into their order.

    Raises:
        VllmxError: of the first piece whose kernel refuses it.
    """
    if not pieces:
        return
    kernels = dict.fromkeys(piece.stored.kernel for piece in pieces if piece.stored)
    device.prepare(list(kernels), progress=progress)
    faults = device.zeros(_WORD_BYTES * len(pieces)) if kernels else None
    ring = _Ring(device, staging, faults, pieces)
    filling: deque[Future[object]] = deque()
    done, total = 0, sum(piece.num_bytes for piece in pieces)
    with ThreadPoolExecutor(min(len(ring.buffers), available_processors())) as pool:
        for index, piece in enumerate(pieces):
            filling.append(pool.submit(piece.fill, ring.free_buffer(index)))
            begin = index + 1 - len(filling)
            while filling and (len(filling) == len(ring.buffers) or index + 1 == len(pieces)):
                filling.popleft().result()
                done += ring.send(begin)
                begin += 1
                if progress:
                    show_progress("loading weights", done, total)
    device.synchronize()
    if faults is not None:
        _check(pieces, device, faults)


@dataclass
class _Ring:
    """Pinned buffers, used in turn."""

    device: Device
    staging: Memory
    faults: Memory | None
    """A u32 for each piece."""
    pieces: Sequence[Piece]
    buffers: list[Bytes] = field(init=False)
    copied: list[Event | None] = field(init=False)

    def __post_init__(self) -> None:
        size = max(piece.num_bytes for piece in self.pieces)
        most = min(max(PIECES_IN_FLIGHT, available_processors()), MOST_IN_FLIGHT, len(self.pieces))
        self.buffers = [self.device.pinned(size) for _ in range(most)]
        self.copied = [None] * most

    def free_buffer(self, index: int) -> Bytes:
        """The buffer of a piece, when the last copy out of it has run."""
        slot = index % len(self.buffers)
        event = self.copied[slot]
        if event is not None:
            event.wait()
        return self.buffers[slot][: self.pieces[index].num_bytes]

    def send(self, index: int) -> int:
        """Enqueues what brings a filled piece to its place; its bytes."""
        piece, slot = self.pieces[index], index % len(self.buffers)
        buffer, begin, stored = self.buffers[slot], 0, piece.stored
        targets = piece.targets if stored is None else (self.staging.at(0, stored.num_bytes),)
        for target in targets:
            self.device.upload(target, buffer[begin : begin + target.num_bytes])
            begin += target.num_bytes
        self.copied[slot] = self.device.event()
        if stored is not None:
            assert self.faults is not None
            fault = self.faults.at(_WORD_BYTES * index, _WORD_BYTES)
            stored.launch(self.device, targets[0], fault)
        return piece.num_bytes


def _check(pieces: Sequence[Piece], device: Device, faults: Memory) -> None:
    found = device.pinned(faults.num_bytes)
    device.download(found, faults)
    device.synchronize()
    words = found.view(np.uint32)
    for index in np.flatnonzero(words).tolist():
        stored = pieces[index].stored
        assert stored is not None
        raise stored.refusal(int(words[index]))
