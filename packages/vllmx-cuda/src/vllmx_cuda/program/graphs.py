"""Pieces of the stream that repeat: enqueued once as they are, then captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from vllmx_cuda.device.device import Device, Graph


class Graphs:
    """Captured pieces by key.

    Args:
        enabled: False: every piece is enqueued launch by launch, for debugging.
    """

    def __init__(self, device: Device, *, enabled: bool) -> None:
        self._device, self._enabled = device, enabled
        self._graphs: dict[Hashable, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Enqueues a piece that is always the same for its key. The first time it runs as it is, so
        that algorithms are chosen, and is captured behind that."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.launch()
            return
        if not self._enabled:
            enqueue()
            return
        with self._device.tuning():
            enqueue()
        self._graphs[key] = self._device.capture(enqueue)
