"""Binds the socket, starts the engine, serves with hypercorn, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server.app import build_app
from vllmx_server.config import ServerConfig

logger = logging.getLogger("vllmx.server")


def run_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_ready: Callable[[AsyncLLM, str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the engine and the base URL once requests are
    accepted. Raises ConfigError when the address cannot be bound (before the model is loaded) and
    the typed errors of loading."""
    asyncio.run(_serve(engine, server, on_ready))


async def _serve(
    engine: EngineConfig,
    server: ServerConfig,
    on_ready: Callable[[AsyncLLM, str], None] | None,
) -> None:
    listener, url = bind(server)
    try:
        async with await AsyncLLM.start(engine) as llm:
            app = build_app(llm, server)
            stop = _stop_event(app, llm, server)
            if on_ready is not None:
                on_ready(llm, url)
            await serve(
                app,  # type: ignore[arg-type]
                _hypercorn_config(server, listener),
                shutdown_trigger=stop.wait,
            )
    finally:
        listener.close()
        if server.uds is not None:
            Path(server.uds).unlink(missing_ok=True)


def bind(server: ServerConfig) -> tuple[socket.socket, str]:
    """A listening socket and its base URL. Raises ConfigError that says what to do."""
    try:
        if server.uds is not None:
            return _bind_unix(server.uds), f"unix:{server.uds}"
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {server.uds or f'{server.host}:{server.port}'}"
            f" ({os.strerror(error.errno) if error.errno else error}): choose another --port or"
            " stop the program that uses it",
            param="port",
        ) from None
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if family == socket.AF_INET6 else server.host
    return listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) != 0:  # left behind by a server that was killed
                Path(path).unlink()
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    return listener


def _hypercorn_config(server: ServerConfig, listener: socket.socket) -> Config:
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]  # hypercorn closes it
    config.root_path = server.root_path
    config.certfile = server.ssl_certfile
    config.keyfile = server.ssl_keyfile
    config.graceful_timeout = 2.0  # requests in flight were waited for before
    config.keep_alive_timeout = 75.0
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("vllmx.hypercorn")
    return config


def _stop_event(app: Starlette, llm: AsyncLLM, server: ServerConfig) -> asyncio.Event:
    """An event that is set once a signal came and the requests in flight have ended. The first
    signal drains, the second stops at once."""
    stop = asyncio.Event()
    state = app.state.server
    tasks: list[asyncio.Task[None]] = []

    async def drain() -> None:
        logger.info("draining: %d requests in flight", state.in_flight)
        if not await llm.drain(server.drain_timeout_s):
            logger.warning("drain timed out; the remaining requests are aborted")
        stop.set()

    def on_signal() -> None:
        if state.draining:
            stop.set()
            return
        state.draining = True
        tasks.append(asyncio.get_running_loop().create_task(drain()))

    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
