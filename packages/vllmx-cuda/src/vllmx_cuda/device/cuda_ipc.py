"""Device memory of other processes on the same host, by CUDA's handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.peers import UnreachableError

T = TypeVar("T")
_UNIT = 2 << 20
"""A whole unit of the driver's, so that nothing else lies in what others may open."""


class CudaIpc:
    """`vllmx_cuda.device.peers.Reach`.

    Args:
        runtime: `cupy.cuda.runtime`; the GPU `place` must be the thread's device.
    """

    def __init__(self, runtime: Any, place: int) -> None:
        self._runtime = runtime
        self._place = place

    @property
    def place(self) -> int:
        return self._place

    def check(self, place: int) -> None:
        """See `Reach.check`."""
        ask = self._runtime.deviceCanAccessPeer
        if place != self._place and not self._call(lambda: ask(self._place, place)):
            raise UnreachableError(
                f"GPU {self._place} cannot read the memory of GPU {place} (nvidia-smi topo -p2p r)"
            )

    def share(self, num_bytes: int) -> tuple[Memory, bytes]:
        """See `Reach.share`. Not from a pool, for a handle opens a whole allocation."""
        size = -(-num_bytes // _UNIT) * _UNIT

        def make() -> tuple[int, bytes]:
            address = int(self._runtime.malloc(size))
            self._runtime.memset(address, 0, size)
            self._runtime.deviceSynchronize()  # before anybody else writes there
            return address, bytes(self._runtime.ipcGetMemHandle(address))

        address, name = self._call(make)
        return Memory(address, num_bytes, self._runtime), name

    def open(self, name: bytes) -> int:
        """See `Reach.open`."""
        return int(self._call(lambda: self._runtime.ipcOpenMemHandle(name)))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._runtime.CUDARuntimeError as error:
            raise UnreachableError(f"GPU memory cannot be shared: {error}") from error
