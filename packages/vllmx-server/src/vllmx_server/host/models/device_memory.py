"""Free memory for a further model: of the host, or of the device of its backend.

A process of its own asks the backend: a process that asks a GPU keeps some hundred MB of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
from importlib import import_module

import msgspec
from vllmx_core.backend import HasMemory
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.system.memory import free_bytes

logger = logging.getLogger("vllmx.supervisor")

HOST = "host"
_ASK_S = 60.0


class FreeMemory(msgspec.Struct, frozen=True):
    """Memory that may be taken."""

    device: str
    """The name of the backend whose memory it is, or `HOST`: models of one device share it."""
    num_bytes: float
    """Infinite if unknown."""


class _Answer(msgspec.Struct, frozen=True):
    """The answer of that process. None: the backend's models are in the host's memory."""

    num_bytes: int | None


class DeviceMemory:
    """Asks backends for their free memory, and remembers which have memory of their own."""

    def __init__(self) -> None:
        self._has_own: dict[str, bool] = {}
        """True if a backend's models are not in the host's memory, by its implementation."""

    async def device(self, registry: Registry, backend: str) -> str:
        """The device of a backend; see `FreeMemory.device`."""
        spec = await _chosen(registry, backend)
        if spec is None or not self._has_own.get(spec.implementation, True):
            return HOST
        if spec.implementation in self._has_own:
            return spec.name
        return (await self.free(registry, backend)).device

    async def free(self, registry: Registry, backend: str) -> FreeMemory:
        """The memory that is free now for a model.

        Args:
            backend: its name, or "auto". If none can run, the result is the host's memory: loading
                will report why.
        """
        spec = await _chosen(registry, backend)
        if spec is not None and self._has_own.get(spec.implementation, True):
            found = await asyncio.to_thread(_asked, spec)
            if found is None:
                return FreeMemory(spec.name, math.inf)
            self._has_own[spec.implementation] = found.num_bytes is not None
            if found.num_bytes is not None:
                return FreeMemory(spec.name, found.num_bytes)
        return FreeMemory(HOST, int(free_bytes()))


async def _chosen(registry: Registry, backend: str) -> BackendSpec | None:
    try:
        return (await asyncio.to_thread(registry.choose_backend, backend))[0]
    except VllmxError:
        return None


def _asked(spec: BackendSpec) -> _Answer | None:
    """The answer of a backend in a process of its own; None: it failed."""
    command = [sys.executable, "-P", "-m", __name__, spec.implementation]
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command, check=False, capture_output=True, timeout=_ASK_S
        )
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=_Answer)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        what = type(error).__name__
        logger.warning("backend %s does not say how much memory is free: %s", spec.name, what)
        return None


def main() -> None:
    """Writes the `_Answer` of the backend that the command line names."""
    module, _, attribute = sys.argv[1].partition(":")
    backend = getattr(import_module(module), attribute)()
    answer = _Answer(backend.free_bytes() if isinstance(backend, HasMemory) else None)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
