"""A server that has one process."""

from __future__ import annotations

import os
import signal

from starlette.requests import Request
from starlette.responses import Response
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server.limits.sharing import ALONE
from vllmx_server.watch.metrics import MetricCounts


class OneProcess:
    """See `vllmx_server.generating.served.Processes`."""

    leads = True
    sharing = ALONE

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def relay(self, request: Request, body: bytes) -> Response:
        raise AssertionError("there is no other process")

    async def metric_counts(self, own: dict[str, MetricCounts]) -> list[dict[str, MetricCounts]]:
        return []

    async def sleep(self) -> None:
        await self._llm.sleep()

    async def wake(self) -> None:
        await self._llm.wake()

    def shut_down(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
