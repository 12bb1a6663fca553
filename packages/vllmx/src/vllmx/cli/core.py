"""`vllmx core`: an engine core for servers on other hosts."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import ModelCommand, needs_unix_sockets
from vllmx.cli.options import engine_options, log_level_option, resolve

logger = logging.getLogger("vllmx.supervisor")


@click.command(cls=ModelCommand)
@engine_options
@click.option("--listen", default="127.0.0.1:7100", show_default=True, help="Address and port.")
@log_level_option("info")
def core(listen: str, log_level: str, **flags: Any) -> None:
    """Run MODEL for servers on other hosts, which name this one by --replica-hosts.

    Several servers may use it at a time; it is started again when it dies. They prove that they
    have the key of --rank-key-file. What goes between hosts is not encrypted: give it a network
    that only they use.
    """
    needs_unix_sockets("core")
    configure_logging(log_level)
    (config,) = resolve((EngineConfig,), flags)
    from vllmx_core.system.greeter import listen as opened_at
    from vllmx_core.system.greeter import listen_address
    from vllmx_core.system.handshake import read_key
    from vllmx_engine.checked_flags import check_flags

    if config.replica_hosts is not None:
        raise ConfigError(
            "--replica-hosts names the hosts of cores for a server: leave it out of `vllmx core`",
            param="replica_hosts",
        )
    check_flags(config)
    key = read_key(config.rank_key_file, "clients")
    with opened_at(listen_address(listen)) as listener:
        asyncio.run(_run(config, listener, key))


async def _run(config: EngineConfig, listener: Any, key: bytes) -> None:
    """Serves until SIGTERM or SIGINT."""
    from vllmx_engine.core.found_model import find_model
    from vllmx_engine.link.core_host import serve_core

    host, port = listener.getsockname()[:2]
    found = await asyncio.to_thread(find_model, config)
    serving = asyncio.ensure_future(
        serve_core(found, listener, key, lambda: logger.info("ready at %s:%d", host, port))
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()
