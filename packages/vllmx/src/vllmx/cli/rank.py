"""`vllmx rank`: ranks of a model that a server on another host runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import needs_unix_sockets
from vllmx.cli.options import log_level_option


@click.command()
@click.argument("model")
@click.option("--listen", default="127.0.0.1:7000", show_default=True, help="Address and port.")
@click.option("--rank-key-file", required=True, help="The key that all hosts have.")
@click.option("--mmproj", help="The server's file of that flag, as it lies on this host.")
@log_level_option("info")
def rank(model: str, listen: str, rank_key_file: str, mmproj: str | None, log_level: str) -> None:
    """Run ranks of MODEL, as it lies on this host, for a server that names it by --rank-hosts.

    The server says everything else. Wait for it, serve it until it ends, wait again. What goes
    between hosts is not encrypted: give it a network that only they use.
    """
    needs_unix_sockets("rank")
    configure_logging(log_level)
    try:
        listener: Any = import_module("vllmx_tp.hosted_group")
    except ImportError as error:
        raise ConfigError("vllmx rank needs vllmx-tp: pip install 'vllmx[tp]'") from error
    from vllmx_core.system.greeter import listen as opened_at
    from vllmx_core.system.greeter import listen_address
    from vllmx_core.system.handshake import read_key

    key = read_key(rank_key_file)
    with opened_at(listen_address(listen)) as opened:
        listener.serve_ranks(opened, EngineConfig(model=model, mmproj=mmproj), key)
