"""Binds the socket, starts the engine, serves with hypercorn, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from hypercorn.config import Config
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, EngineDeadError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server.app import build_app
from vllmx_server.config import ServerConfig
from vllmx_server.connections.connection import Timeouts
from vllmx_server.connections.descriptors import connection_limit, raise_descriptor_limit
from vllmx_server.connections.listening import ConnectionLimits
from vllmx_server.connections.serving import serve
from vllmx_server.connections.versions import check_versions
from vllmx_server.loop_errors import on_loop_error
from vllmx_server.state import ServerState
from vllmx_server.store.storage import Storage

logger = logging.getLogger("vllmx.server")

_PREPARE_S = 2.0
"""From the start to making what grammars need."""
_CLOSE_S = 2.0
"""What connections get to end once all answers are sent."""
_BACKLOG = 1024
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_ready: Callable[[AsyncLLM, str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the engine and the base URL once requests are
    accepted. Raises ConfigError when the address or the certificate cannot be used (before the
    model is loaded), the typed errors of loading, EngineDeadError when the engine core is gone for
    good, and KeyboardInterrupt when a signal comes while the model loads."""
    asyncio.run(_serve(engine, server, on_ready))


async def _serve(
    engine: EngineConfig,
    server: ServerConfig,
    on_ready: Callable[[AsyncLLM, str], None] | None,
) -> None:
    check_versions()
    config, limits = hypercorn_config(server), connection_limits(server)
    timeouts = Timeouts(server.header_timeout_s, server.send_timeout_s)
    storage = Storage(server)
    listener, url = bind(server)
    if not (server.api_key or server.uds or server.host in _LOOPBACK):
        logger.warning("everybody who reaches %s can use this server: set --api-key", server.host)
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    try:
        signals = _Signals()
        async with await AsyncLLM.start(engine) as llm:
            app = build_app(llm, server, storage)
            await app.state.server.background.start()
            listen(listener, server)
            stop = signals.begin_serving(app.state.server)
            if on_ready is not None:
                on_ready(llm, url)
            serving = asyncio.ensure_future(serve(app, config, listener, limits, timeouts, stop))
            dying = asyncio.ensure_future(llm.until_dead())
            preparing = asyncio.ensure_future(_prepare_grammars(llm))
            await _until_stopped(serving, stop, dying)
            preparing.cancel()
            await app.state.server.background.stop()
            if dying.done() and not dying.cancelled():
                raise dying.result()
    finally:
        storage.close()
        listener.close()
        if server.uds is not None:
            Path(server.uds).unlink(missing_ok=True)


async def _prepare_grammars(llm: AsyncLLM) -> None:
    """A while after the start, when who waited for it has been served."""
    await asyncio.sleep(_PREPARE_S)
    try:
        await llm.prepare_grammars()
    except Exception:  # the first grammar will meet it again, and say so
        logger.exception("grammars cannot be prepared")


async def _until_stopped(
    serving: asyncio.Future[None], stop: asyncio.Event, dying: asyncio.Future[EngineDeadError]
) -> None:
    """A server whose engine is gone for good ends too: whoever supervises it can start another."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((serving, stopping, dying), return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait((serving,), timeout=2 * _CLOSE_S)
    for task in (serving, stopping, dying):
        task.cancel()
    await asyncio.wait((serving, stopping, dying))
    if not serving.cancelled():
        serving.result()


# --- the socket -----------------------------------------------------------------------------------
def bind(server: ServerConfig) -> tuple[socket.socket, str]:
    """A bound socket, not listening yet, and its base URL. Raises ConfigError that says what to
    do."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # By its protocol asyncio knows that TCP must not wait for a client's ACK before it sends more.
    listener = (
        socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if server.uds is None
        else socket.socket(socket.AF_UNIX)
    )
    try:
        if server.uds is not None:
            _bind_unix(listener, server.uds)
            return listener, f"unix:{server.uds}"
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(server, error) from None
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if family == socket.AF_INET6 else server.host
    return listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def listen(listener: socket.socket, server: ServerConfig) -> None:
    """Connections are accepted from now on. Raises ConfigError when another program took the
    address between `bind` and now."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(server, error) from None


def _cannot_listen(server: ServerConfig, error: OSError) -> ConfigError:
    if server.uds is not None:
        where, param = server.uds, "uds"
        remedy = "choose another --uds, or stop the program that uses it"
    elif isinstance(error, socket.gaierror):
        where, param = server.host, "host"
        remedy = "--host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    else:
        where, param = f"{server.host}:{server.port}", "port"
        remedy = "choose another --port, or stop the program that uses it"
    reason = error.strerror or str(error)
    return ConfigError(f"cannot listen on {where} ({reason}): {remedy}", param=param)


def _bind_unix(listener: socket.socket, path: str) -> None:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) != 0:  # left behind by a server that was killed
                Path(path).unlink()
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)


def connection_limits(server: ServerConfig) -> ConnectionLimits:
    """Raises this process's limit of open files, and ConfigError for more connections than it
    allows."""
    in_all = connection_limit(server.max_connections, raise_descriptor_limit())
    per_address = server.max_connections_per_address or max(1, in_all // 2)
    return ConnectionLimits(in_all, min(per_address, in_all))


def hypercorn_config(server: ServerConfig) -> Config:
    """All but the socket. Raises ConfigError for a certificate that cannot be used."""
    config = Config()
    config.root_path = server.root_path
    config.certfile = server.ssl_certfile
    config.keyfile = server.ssl_keyfile
    config.graceful_timeout = _CLOSE_S
    config.keep_alive_timeout = 75.0
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("vllmx.hypercorn")
    config.errorlog.setLevel(logging.WARNING)
    try:
        config.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and --ssl-keyfile {server.ssl_keyfile} cannot be"
            f" used ({error.strerror or error}): both must be readable PEM files that belong"
            " together",
            param="ssl_certfile",
        ) from None
    return config


# --- signals --------------------------------------------------------------------------------------
class _Signals:
    """SIGTERM and SIGINT: while the model loads they end the program; later the first drains and
    the second stops at once."""

    def __init__(self) -> None:
        self._state: ServerState | None = None
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        if sys.platform != "win32":
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def begin_serving(self, state: ServerState) -> asyncio.Event:
        """Returns the event that is set when the server must stop."""
        self._state = state
        return self._stop

    def _on_signal(self) -> None:
        if self._state is None:
            raise KeyboardInterrupt  # leaves the event loop, which cancels and cleans up
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(self._state))
        else:
            self._stop.set()

    async def _drain(self, state: ServerState) -> None:
        logger.info("draining: %d requests in flight", state.in_flight)
        if not await state.drain(state.config.drain_timeout_s):
            logger.warning("drain timed out: %d requests are aborted", state.in_flight)
            await state.llm.shutdown()  # they end with finish reason "abort"
            await state.drain(_CLOSE_S)
        self._stop.set()
