"""A process that answers requests: `python -P -m vllmx_server.host.worker DESCRIPTORS`.

Started by `vllmx_server.host.workers.pool`, with the descriptors of the control channel, the shared
counts, the listening socket, and the operators' socket if there is one. The process exits at once
when the control channel ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys

import msgspec
from vllmx_core.errors import VllmxError
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.standard_error import StandardError
from vllmx_engine.wire.ipc import ErrorRecord
from vllmx_engine.wire.messages import CoreInfo

from vllmx_server.host.models.registry import attach
from vllmx_server.host.process import serve_until_stopped
from vllmx_server.host.server import Server
from vllmx_server.host.signals import Serving
from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.messages import Begin, DrainReplica, Reload
from vllmx_server.host.workers.peers import Peers
from vllmx_server.watch.metrics import MetricCounts

logger = logging.getLogger("vllmx.server")

_TELL_S = 1.0


class Worker:
    """Serves under the control of the supervisor.

    Args:
        listener: descriptor of the mailbox that connections come from.
        operators: that of `--admin-uds`, if there is one.
        counts: descriptor of the shared counts.
    """

    def __init__(
        self,
        channel: Channel,
        listener: int,
        operators: socket.socket | None,
        counts: int,
    ) -> None:
        self._channel = channel
        self._listener = listener
        self._operators = operators
        self._counts = counts
        self._peers: Peers
        self._server: Server | None = None
        """None: the process is starting."""
        self._reload_later: Reload | None = None
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel.serve(
            begin=self._begin,
            lead=self._lead,
            end=self._end,
            stop=self._stop.set,
            reload=self._reload,
            count=self._count,
            leave=self._leave,
            core_lost=self._core_lost,
            drain_replica=self._drain_replica,
            add_replica=self._add_replica,
        )

    def begin_serving(self, serving: Serving) -> asyncio.Event:
        """See `vllmx_server.host.process.Stopping`."""
        assert isinstance(serving, Server)
        self._server = serving
        if self._reload_later is not None:  # the files may have changed since they were read
            self._reload_now(serving, self._reload_later)
        return self._stop

    async def run(self) -> int:
        """Serves until the supervisor stops it or serving fails; returns the exit code."""
        await self._stop.wait()
        if self._serving is None:
            return 0
        if not self._ready.done():
            self._serving.cancel()
        await asyncio.wait((self._serving,))
        if self._telling is not None:
            self._telling.cancel()
        if self._serving.cancelled():
            return 0
        error = self._serving.exception()
        if error is not None and not isinstance(error, VllmxError):
            logger.error("an API process failed", exc_info=error)
        return 0 if error is None else 1

    # --- what the supervisor asks -----------------------------------------------------------------
    async def _begin(self, begin: Begin) -> None:
        logging.getLogger("vllmx").setLevel(begin.server.log_level.upper())
        self._peers = Peers(self._channel, begin, self._counts)
        self._serving = asyncio.ensure_future(self._serve(begin))
        await asyncio.wait((self._serving, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._stop.set()
            self._serving.result()

    async def _serve(self, begin: Begin) -> None:
        async with await attach(begin.core, begin.core_paths) as core:
            await serve_until_stopped(
                core,
                begin.server,
                self._peers.accepting(self._listener),
                self,
                self._on_ready,
                self._peers,
                begin.models,
                self._operators,
            )

    def _on_ready(self, _: CoreInfo) -> None:
        self._ready.set_result(None)
        self._telling = asyncio.ensure_future(self._tell_counts())

    async def _lead(self, is_first: bool) -> None:
        """Takes over batches and background responses. `is_first`: no worker of this server has led
        before."""
        assert self._server is not None, "a process that is being started does not lead"
        self._peers.leads = True
        await self._server.start(takes_over=not is_first)

    async def _end(self) -> None:
        if self._server is not None:
            await self._server.end()

    def _reload(self, found: Reload) -> None:
        if self._server is None:
            self._reload_later = found
        else:
            self._reload_now(self._server, found)

    def _reload_now(self, server: Server, found: Reload) -> None:
        """Reloads quietly: the supervisor has logged the result."""
        server.reload(keys=found.keys, certificate=found.certificate, level=logging.DEBUG)

    async def _tell_counts(self) -> None:
        """Sends new counts to the supervisor, which keeps them when this process dies."""
        told = b""
        while True:
            await asyncio.sleep(_TELL_S)
            counts = self._count()
            now = msgspec.msgpack.encode(counts)
            if now != told:
                told = now
                self._channel.tell("counted", counts)

    def _count(self) -> dict[str, MetricCounts]:
        if self._server is None:
            return {}
        served = self._server.served
        found = [served.metrics] if served.models is None else served.models.metrics()
        return {each.model: each.counts() for each in found}

    async def _leave(self, name: str) -> bool:
        models = None if self._server is None else self._server.served.models
        return models is None or await models.leave(name)

    async def _drain_replica(self, asked: DrainReplica) -> None:
        if self._server is not None:
            await self._server.served.llm.drain_replica(asked.number, asked.timeout_s)

    async def _add_replica(self, number: int) -> None:
        if self._server is not None:
            await self._server.served.llm.add_replica(number)

    def _core_lost(self, cause: ErrorRecord) -> None:
        if self._server is not None:
            self._server.served.llm.note(cause.rebuild())


async def _run(control: int, counts: int, listener: int, operators: int | None = None) -> int:
    channel = await Channel.over(socket.socket(fileno=control))
    admin = None if operators is None else socket.socket(fileno=operators)
    worker = Worker(channel, listener, admin, counts)
    running = asyncio.ensure_future(worker.run())
    leaving = asyncio.ensure_future(channel.gone.wait())
    await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        logger.warning("the supervisor is gone: exiting")
        logging.shutdown()
        os._exit(1)
    leaving.cancel()
    return running.result()


def main() -> int:
    """Runs a worker, which leaves signals to the supervisor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure_logging(stream=StandardError())
    faulthandler.enable()
    code = asyncio.run(_run(*map(int, sys.argv[1:])))
    logging.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
