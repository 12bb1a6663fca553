"""The start of an engine core, apart from all that the process which asks it needs for itself.

It imports little. So the core's process can load the model while this one imports the rest, which
takes about as long as the core's own imports.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import Registry

from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.link.frontend import Frontend
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.thread_frontend import ThreadFrontend


class CoreStart:
    """A core that loads its model. Made by `begin`; leaving it as a context ends the core, unless
    `ready` has handed it out.

    Attributes:
        found: what it loads.
    """

    def __init__(self, found: FoundModel, starting: asyncio.Future[Frontend]) -> None:
        self.found = found
        self._starting = starting
        self._is_taken = False

    @classmethod
    async def begin(
        cls, config: EngineConfig, registry: Registry | None = None, *, in_process: bool = False
    ) -> Self:
        """Finds the model and returns when the core's process, or its thread, has begun. The
        arguments are those of `AsyncLLM.start`. Raises what `find_model` raises."""
        found = await asyncio.to_thread(find_model, config, registry)
        kind = ThreadFrontend if in_process else ProcessFrontend
        starting: asyncio.Future[Frontend] = asyncio.ensure_future(kind.start(found))
        await asyncio.sleep(0)  # until its first wait, by when the process is there
        return cls(found, starting)

    async def ready(self) -> Frontend:
        """The way to the core, whose end is the caller's business from now on. Raises the
        VllmxError that loading met."""
        frontend = await self._starting
        self._is_taken = True
        return frontend

    async def cancel(self) -> None:
        """Ends the core. Does nothing once it was handed out."""
        if self._is_taken:
            return
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled() and self._starting.exception() is None:
            await self._starting.result().close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel()
