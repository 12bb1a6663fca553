"""`vllmx replicas`: the engine cores behind a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from vllmx_core.errors import ConfigError

from vllmx.cli.running_server import ask_server
from vllmx.cli.tables import print_table

_TIMEOUT_S = 600
"""A replica that is added loads the model first."""
F = TypeVar("F", bound=Callable[..., Any])


def _server(command: F) -> F:
    command = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="A running server."
    )(command)
    return click.option(
        "--api-key", envvar="VLLMX_API_KEY", help="Bearer token, one of --admin-key."
    )(command)


@click.group()
def replicas() -> None:
    """List, drain and add the replicas of a server that runs with --replicas."""


@replicas.command("list")
@_server
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def list_replicas(url: str, api_key: str | None, as_json: bool) -> None:
    """List the replicas and what they do."""
    found = _ask(url, api_key, "/replicas")
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _print(found)


@replicas.command()
@click.argument("number", type=int)
@_server
def drain(number: int, url: str, api_key: str | None) -> None:
    """End replica NUMBER. Its requests end there or, after --drain-timeout-s, go on elsewhere."""
    _print(_ask(url, api_key, "/replicas/drain", number))


@replicas.command()
@click.argument("number", type=int)
@_server
def add(number: int, url: str, api_key: str | None) -> None:
    """Start the drained replica NUMBER again."""
    _print(_ask(url, api_key, "/replicas/add", number))


def _print(found: list[dict[str, Any]]) -> None:
    rows = [("REPLICA", "ROLE", "STATE", "RUNNING", "WAITING", "CACHED BLOCKS")]
    for one in found:
        counts = (one["num_running"], one["num_waiting"], one["num_cached_blocks"])
        rows.append((str(one["replica"]), one["role"], one["state"], *map(str, counts)))
    print_table(rows)


def _ask(url: str, api_key: str | None, path: str, number: int | None = None) -> Any:
    """The replicas of a server, after it has done what it was asked. Raises ConfigError."""
    body = None if number is None else json.dumps({"replica": number}).encode()
    status, data = ask_server(url, path, api_key, body, _TIMEOUT_S)
    try:
        found = json.loads(data)
        if status == 200:
            return found["replicas"]
        reason = str(found["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = f"{url.rstrip('/')}{path} answers {status}"
    remedy = ": give --api-key, one of the server's --admin-key" if status in (401, 403) else ""
    raise ConfigError(f"{reason}{remedy}")
