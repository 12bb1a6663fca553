"""Copies of KV blocks and state slots, for `vllmx_core.backend.HasMovableCache`. They are enqueued
on the stream of the steps, whose order they keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from vllmx_core.plan import I32, U8

from vllmx_cuda.device.device import Device, Event
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.program.kv_cache import LayerPages, LayerStates

_MAX_UPLOADS = 4
"""Uploads whose page-locked memory is held before the oldest is waited for."""


class CudaCopy:
    """A `CopyOut`: parts (n, bytes), one after the other, complete at an event."""

    def __init__(self, parts: Sequence[Bytes], event: Event) -> None:
        self._parts, self._event = parts, event

    def result(self) -> U8:
        self._event.wait()
        return np.concatenate(self._parts, axis=1)


class CudaRows:
    """`vllmx_core.backend.MovableRows` of spans of memory.

    Args:
        spans: memory from that of row 0 on, and the bytes of a row.
    """

    def __init__(self, spans: Sequence[tuple[Memory, int]], device: Device) -> None:
        self._spans, self._device = spans, device
        self._held: deque[tuple[Event, Bytes]] = deque()

    def copy_out(self, rows: I32) -> CudaCopy:
        device, parts = self._device, []
        with device.faults():
            device.activate()
            for memory, width in self._spans:
                part = device.pinned(len(rows) * width).reshape(len(rows), width)
                for first, count, row in _runs(rows):
                    target = part[first : first + count].reshape(-1)
                    device.download(target, memory.at(row * width, count * width))
                parts.append(part)
            parts.append(np.zeros((len(rows), 0), np.uint8))  # a model may keep states alone
            return CudaCopy(parts, device.event())

    def copy_in(self, rows: I32, data: U8) -> None:
        device, begin = self._device, 0
        with device.faults():
            device.activate()
            for memory, width in self._spans:
                part = device.pinned(len(rows) * width).reshape(len(rows), width)
                part[...] = data[:, begin : begin + width]
                for first, count, row in _runs(rows):
                    source = part[first : first + count].reshape(-1)
                    device.upload(memory.at(row * width, count * width), source)
                self._held.append((device.event(), part))
                begin += width
            while len(self._held) > _MAX_UPLOADS * len(self._spans):
                self._held.popleft()[0].wait()


def _runs(rows: I32) -> Iterator[tuple[int, int, int]]:
    """Neighbours among the rows: the place of the first, their number and the first row."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for first, end in zip([0, *ends], ends, strict=False):
        yield first, end - first, int(rows[first])


def block_spans(pages: Sequence[LayerPages], num_blocks: int) -> list[tuple[Memory, int]]:
    """All keys, values and scales; those that layers share once."""
    parts = {
        part.address: part
        for page in pages
        for part in (page.k, page.v, page.k_scales, page.v_scales)
        if part is not None and part.num_bytes
    }
    return [(part, part.num_bytes // num_blocks) for part in parts.values()]


def slot_spans(states: Sequence[LayerStates]) -> list[tuple[Memory, int]]:
    """The states of all layers, which lie one behind the other in a slot."""
    return [(states[0].memory, 4 * states[0].slot_floats)] if states else []
