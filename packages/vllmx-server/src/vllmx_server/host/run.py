"""Binds the socket, starts the engine, serves with hypercorn, drains on SIGTERM.

The modules that answer requests are imported while the core's process loads the model: this module
imports little itself, so that the core starts at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.files import warn_of_readers
from vllmx_core.system.processors import available_processors
from vllmx_engine.checked_flags import check_flags
from vllmx_engine.core_start import CoreStart

from vllmx_server.config import ServerConfig
from vllmx_server.host.address import (
    bind,
    bind_operators,
    check_certificate,
    passed_by_systemd,
    url_of,
)
from vllmx_server.host.signals import Signals
from vllmx_server.watch.collector import check_tracing

if TYPE_CHECKING:
    from vllmx_engine.wire.messages import CoreInfo

    from vllmx_server.host.models.config import ModelConfig

logger = logging.getLogger("vllmx.server")

_MOST_WORKERS = 8
"""More workers than this can rarely be used by one core."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    models: Sequence[ModelConfig] = (),
    on_ready: Callable[[str, CoreInfo, str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; several `models`, of which `engine` is the first, if they are
    given. `on_ready` gets the model's name, the result of loading and the base URL once requests
    are accepted. Raises ConfigError when the address or the certificate
    cannot be used (without waiting for the model), the typed errors of loading, EngineDeadError
    when the engine core is gone for good, and KeyboardInterrupt when a signal comes while the
    model loads."""
    asyncio.run(_serve(engine, server, models, on_ready))


def _suitable_workers() -> int:
    """One for each processor but that of the engine's loop."""
    return min(max(1, available_processors() - 1), _MOST_WORKERS)


async def _serve(
    engine: EngineConfig,
    server: ServerConfig,
    models: Sequence[ModelConfig],
    on_ready: Callable[[str, CoreInfo, str], None] | None,
) -> None:
    # Report errors before the core's process starts: a model may take minutes to load.
    if server.idle_unload_s and not models:
        from vllmx_server.host.models.config import ModelConfig

        models = (ModelConfig(engine=engine),)
    for checked in [model.engine for model in models] or [engine]:
        check_flags(checked)
    check_certificate(server)
    check_tracing(server.otlp_traces_endpoint)
    if server.mcp_config is not None:
        from vllmx_server.mcp.settings import read_servers

        read_servers(server.mcp_config, "--mcp-config", warns=True)
    if server.api_keys_file is not None:
        from vllmx_server.limits.key_records import read_keys

        read_keys(server.api_keys_file)
        warn_of_readers(server.api_keys_file, "--api-keys-file")
    if server.data_dir is not None:
        from vllmx_server.store.folder import Folder

        Folder(server.data_dir).close()
    passed, server = passed_by_systemd(server)
    operators = bind_operators(server)
    try:
        listener, url = bind(server) if passed is None else (passed, url_of(passed, server))
    except BaseException:
        _unbind(operators, server.admin_uds)
        raise
    if not (server.api_key or server.api_keys_file or server.uds or server.host in _LOOPBACK):
        logger.warning("everybody who reaches %s can use this server: set --api-key", server.host)

    def announce(info: CoreInfo) -> None:
        if on_ready is not None:
            on_ready(engine.name, info, url)

    try:
        signals = Signals()
        scales = any(one.min_replicas for one in (engine, *(model.engine for model in models)))
        suitable = 1 if engine.replica_hosts or scales else _suitable_workers()
        server = dataclasses.replace(server, api_workers=server.api_workers or suitable)
        if scales and (server.api_workers != 1 or len(models) > 1):
            raise ConfigError(
                "--min-replicas needs one API process and one model: leave --api-workers out, and"
                " start a server for each model",
                param="min_replicas",
            )
        if server.api_workers != 1:
            workers: Any = await asyncio.to_thread(
                import_module, "vllmx_server.host.workers.supervisor"
            )
            await workers.serve_with_workers(
                engine, models, server, listener, signals, announce, operators
            )
            return
        async with await CoreStart.begin(engine) as core:
            running: Any = await asyncio.to_thread(import_module, "vllmx_server.host.process")
            await running.serve_until_stopped(
                core, server, listener, signals, announce, None, models, operators
            )
    finally:
        _unbind(operators, server.admin_uds)
        _unbind(listener, server.uds if passed is None else None)


def _unbind(listener: socket.socket | None, path: str | None) -> None:
    """Closes a socket and removes its file, if it has one."""
    if listener is None:
        return
    listener.close()
    if path is not None:
        Path(path).unlink(missing_ok=True)
