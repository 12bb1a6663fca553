"""The server from its engine's start to its end; `run` imports it while the model loads."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

from hypercorn.config import Config
from vllmx_core.errors import EngineDeadError
from vllmx_core.system.private_traceback import private_traceback
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core_start import CoreStart
from vllmx_engine.wire.messages import CoreInfo

from vllmx_server.config import ServerConfig
from vllmx_server.host.address import check_certificate, listen
from vllmx_server.host.apis import load_apis
from vllmx_server.host.app import build_app, operators_app
from vllmx_server.host.server import Server
from vllmx_server.host.signals import CLOSE_S, Serving
from vllmx_server.http.connections.serving import ConnectionLimits, serve
from vllmx_server.http.connections.settings import (
    AnswerConfig,
    Timeouts,
    check_versions,
    connection_limit,
    raise_descriptor_limit,
)
from vllmx_server.limits.admission import ALONE, Sharing
from vllmx_server.store.database import Storage

if TYPE_CHECKING:
    from vllmx_server.generating.served import Served
    from vllmx_server.host.models.config import ModelConfig
    from vllmx_server.host.workers.peers import Peers

logger = logging.getLogger("vllmx.server")
OPERATORS_LIMITS = ConnectionLimits(64, 64)
"""Limits of the operators' socket, so that a crowd at the public port does not keep them out."""


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The handler of an event loop for errors that nobody awaits. The usual one prints the task,
    and with it the exception's text. Connections that are cut when the server stops are left out,
    which Python 3.11 reports as errors."""
    error = context.get("exception")
    if not isinstance(error, asyncio.CancelledError):
        stack = private_traceback(error) if error is not None else "no exception"
        logger.error("%s\n%s", context.get("message"), stack)


class Stopping(Protocol):
    """Says when to stop: signals, or the supervisor."""

    def begin_serving(self, serving: Serving) -> asyncio.Event:
        """Returns the event that is set when the server must stop."""
        ...


async def serve_until_stopped(
    core: CoreStart,
    server: ServerConfig,
    listener: socket.socket,
    signals: Stopping,
    on_ready: Callable[[CoreInfo], None],
    peers: Peers | None = None,
    models: Sequence[ModelConfig] = (),
    operators: socket.socket | None = None,
) -> None:
    """Answers requests on a bound socket once the core is ready, together with `peers` if there are
    any, and requests of operators on theirs. `models`: if there are several; `core` is that of the
    first. Raises the errors of `run_server`."""
    sharing = ALONE if peers is None else peers.sharing
    config, limits = hypercorn_config(server), connection_limits(server, sharing)
    timeouts = Timeouts(server.header_timeout_s, server.send_timeout_s)
    storage = Storage(server.data_dir) if peers is None else peers.storage()
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    opened = AsyncExitStack()
    apis = await asyncio.to_thread(load_apis, server, core.found.registry)
    try:
        async with await AsyncLLM.over(core) as llm:
            several = is_several(models, server)
            app = build_app(llm, server, storage, peers, several=several, apis=apis)
            process: Server = app.state.server
            await _open_models(opened, process.served, models, peers)
            if peers is None:
                if storage.folder.outlives:
                    await storage.check()
                await process.start()
            process.tls = config.create_ssl_context()
            if peers is None:
                listen(listener, server)
            if operators is not None:
                listen(operators, server)
            stop = signals.begin_serving(process)
            on_ready(llm.info)
            # All objects so far live to the end: without this, each full collection would walk them
            # and halt every stream for 15 to 30 ms.
            gc.freeze()
            gc.set_threshold(700)  # `vllmx.cli` raised it; frequent collections are short
            serving = asyncio.ensure_future(serve(app, config, listener, limits, timeouts, stop))
            beside = asyncio.ensure_future(_serve_operators(process, operators, timeouts, stop))
            dying = asyncio.ensure_future(llm.until_dead())
            llm.prepare_grammars_later()
            await _until_stopped(serving, stop, dying)
            await beside
            await process.stop()
            if process.tracer is not None:
                await process.tracer.close()
            if dying.done() and not dying.cancelled():
                raise dying.result()
    finally:
        for api in apis:
            await asyncio.to_thread(api.close)
        await opened.aclose()
        storage.close()


async def _serve_operators(
    server: Server,
    listener: socket.socket | None,
    timeouts: Timeouts,
    stop: asyncio.Event,
) -> None:
    """Answers on the socket of operators, if there is one, until `stop` is set."""
    if listener is None:
        return
    config = AnswerConfig()
    config.graceful_timeout = CLOSE_S
    config.errorlog = _hypercorn_log()
    await serve(operators_app(server), config, listener, OPERATORS_LIMITS, timeouts, stop)


def is_several(models: Sequence[ModelConfig], server: ServerConfig) -> bool:
    """True if the model of each request must be looked up, and may have to be loaded."""
    idle = bool(models and server.idle_unload_s)
    return len(models) > 1 or idle or any(model.aliases for model in models)


async def _open_models(
    opened: AsyncExitStack, served: Served, configs: Sequence[ModelConfig], peers: Peers | None
) -> None:
    """Opens several models of this process, and their cores if it has no supervisor: those that are
    loaded at the start. `opened` closes them. Raises the errors of loading."""
    if not is_several(configs, served.config):
        return
    from vllmx_server.host.models.host import CoreHost
    from vllmx_server.host.models.registry import Models

    served.models = models = Models(served, configs, served.config.model_wait_s)
    if peers is not None:
        models.host = peers.host
        opened.push_async_callback(models.close)
        return
    models.host = host = CoreHost(configs[1:], served.config.idle_unload_s, models.leave)
    opened.push_async_callback(host.close)
    opened.push_async_callback(models.close)
    host.first_took(served.llm.info)
    host.watch_first(configs[0].name, served.llm)
    for config in configs[1:]:
        if not config.on_demand:
            await host.load(config.name)


async def _until_stopped(
    serving: asyncio.Future[None], stop: asyncio.Event, dying: asyncio.Future[EngineDeadError]
) -> None:
    """Waits for the end of serving, `stop`, or the death of the engine, and stops serving."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((serving, stopping, dying), return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait((serving,), timeout=2 * CLOSE_S)
    for task in (serving, stopping, dying):
        task.cancel()
    await asyncio.wait((serving, stopping, dying))
    if not serving.cancelled():
        serving.result()


def connection_limits(server: ServerConfig, sharing: Sharing = ALONE) -> ConnectionLimits:
    """Raises this process's limit of open files. Raises ConfigError if that allows too few
    connections."""
    in_all = connection_limit(server.max_connections, raise_descriptor_limit())
    per_address = server.max_connections_per_address or max(1, in_all // 2)
    return ConnectionLimits(in_all, min(per_address, in_all), sharing)


def hypercorn_config(server: ServerConfig) -> Config:
    """All but the socket. Raises ConfigError for untested libraries and for a certificate that
    cannot be used."""
    check_versions()
    config = AnswerConfig()
    config.hsts_max_age_s = server.hsts_max_age_s
    config.root_path = server.root_path
    config.certfile = server.ssl_certfile
    config.keyfile = server.ssl_keyfile
    config.graceful_timeout = CLOSE_S
    config.keep_alive_timeout = 75.0
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = _hypercorn_log()
    check_certificate(server)
    return config


def _hypercorn_log() -> logging.Logger:
    found = logging.getLogger("vllmx.hypercorn")
    found.setLevel(logging.WARNING)
    return found
