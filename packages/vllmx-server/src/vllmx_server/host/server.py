"""One process of a server: its APIs, from their start to their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from ssl import SSLContext

from starlette.types import Scope
from vllmx_core.errors import VllmxError

from vllmx_server.generating.api import Api
from vllmx_server.generating.served import Served
from vllmx_server.host.address import reload_certificate
from vllmx_server.host.signals import CLOSE_S
from vllmx_server.http.route import Route
from vllmx_server.limits.keys import reload_keys
from vllmx_server.watch.tracing import Tracer

logger = logging.getLogger("vllmx.server")
_CLEAN_EVERY_S = 600.0
_JUMP_S = 3600.0
"""A clock that jumps ahead by so much may be wrong: nothing is deleted until it has been steady for
`_CLEAN_EVERY_S`."""


class Server:
    """The object that signals, and the supervisor of several processes, act on.

    Args:
        served: the default model.
        routes: of all APIs, for operators and for the public.
        name_route: the path and the method of a request, as logs and metrics may show them.
        tracer: makes spans of requests; closed with the server.

    Attributes:
        tls: the TLS context of connections, where they are encrypted.
    """

    def __init__(
        self,
        served: Served,
        apis: Sequence[Api],
        routes: Sequence[Route],
        name_route: Callable[[Scope], tuple[str, str]],
        tracer: Tracer | None,
    ) -> None:
        self.served = served
        self.apis = apis
        self.routes = routes
        self.name_route = name_route
        self.tracer = tracer
        self.tls: SSLContext | None = None
        self._cleaning: asyncio.Task[None] | None = None

    async def start(self, *, takes_over: bool = False) -> None:
        """Begins the work that one process does for the whole server: batches, and deleting old
        data. `takes_over`: from another process, which has died."""
        for api in self.apis:
            await api.lead(takes_over=takes_over)
        self._cleaning = asyncio.ensure_future(self._clean())

    async def stop(self) -> None:
        """Ends that work. May be called twice, and without `start`."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.wait((self._cleaning,))
            self._cleaning = None
        for api in self.apis:
            await api.stop()

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing new and waits until every answer has been sent; False on timeout."""
        self.served.admission.draining = True
        await self.stop()
        done = await self.served.admission.drain(timeout_s)
        with contextlib.suppress(VllmxError):  # the log has it
            await self.served.usage.keep()
        return done

    async def end(self) -> None:
        """Drains for as long as the configuration says, then aborts the rest."""
        served = self.served
        logger.info("draining: %d requests in flight", served.admission.in_flight)
        if not await self.drain(served.config.drain_timeout_s):
            logger.warning("drain timed out: %d requests are aborted", served.admission.in_flight)
            if served.models is not None:
                await served.models.close()
            await served.llm.shutdown()  # they end with finish reason "abort"
            await self.drain(CLOSE_S)

    def reload(
        self, *, keys: bool = True, certificate: bool = True, level: int = logging.INFO
    ) -> None:
        """Reads the keys and the certificate again. One that cannot be used is logged, and the old
        one stays in use. `level`: of the lines for what can be used."""
        if keys and reload_keys(self.served.keys, level):
            self.served.read_priorities()
        if certificate and self.tls is not None:
            reload_certificate(self.served.config, self.tls, level)

    def close(self) -> None:
        """Frees what APIs hold, after the last request. May be called twice."""
        for api in self.apis:
            api.close()

    async def _clean(self) -> None:
        ahead_s = _ahead_s()
        while True:
            before_s, ahead_s = ahead_s, _ahead_s()
            if self.served.storage.database.is_open and ahead_s - before_s < _JUMP_S:
                with contextlib.suppress(VllmxError):  # the log has it
                    for api in self.apis:
                        await api.clean()
            await asyncio.sleep(_CLEAN_EVERY_S)


def _ahead_s() -> float:
    """Seconds that the clock, which may jump, is ahead of the monotonic one."""
    return time.time() - time.monotonic()
