"""`vllmx keys`: the file that `vllmx serve --api-keys-file` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from vllmx_core.errors import ConfigError
from vllmx_core.system.files import warn_of_readers

if TYPE_CHECKING:
    from vllmx_server.limits.key_records import KeyRecord

_FILE = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    default=Path("keys.json"),
    show_default=True,
    help="The file of keys.",
)
_COUNT = click.IntRange(1, 1 << 40)


@click.group()
def keys() -> None:
    """Make API keys with rights and limits, and list them."""


@keys.command()
@click.argument("name")
@_FILE
@click.option("--admin", is_flag=True, help="May use the routes that change the server.")
@click.option("--model", "models", multiple=True, help="A name of a served model; may be repeated.")
@click.option(
    "--mcp-server",
    "mcp_servers",
    multiple=True,
    help="A server of --mcp-config whose tools it may use; may be repeated. Once one key names any,"
    " those that name none may use none.",
)
@click.option("--requests-per-minute", type=_COUNT)
@click.option("--tokens-per-minute", type=_COUNT, help="Tokens of prompts and answers together.")
@click.option("--concurrency", type=_COUNT, help="Requests at a time.")
@click.option(
    "--share",
    type=click.FloatRange(0.001, 1000),
    default=1.0,
    help="Share of the capacity among keys that wait: 2 gives twice as much as 1.",
)
@click.option("--priority-range", help="LEAST:GREATEST, what `priority` may be.")
def add(
    name: str,
    path: Path,
    admin: bool,
    models: tuple[str, ...],
    mcp_servers: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
    share: float,
    priority_range: str | None,
) -> None:
    """Make a key for NAME and print it, this once: the file has no more than its digest.

    A running server reads the file again at SIGHUP.
    """
    import msgspec
    from vllmx_server.limits.key_records import KeyRecord, digest_of, make_key, write_keys
    from vllmx_server.limits.priorities import parse_range

    records = _read(path) if path.exists() else ()
    if any(record.name == name for record in records):
        raise ConfigError(f"{path} has a key for {name!r}: remove it first, or take another name")
    if priority_range is not None:
        parse_range(priority_range)
    key = make_key()
    try:
        made = msgspec.convert(
            {
                "name": name,
                "sha256": digest_of(key),
                "admin": admin,
                "models": models or None,
                "mcp_servers": mcp_servers or None,
                "requests_per_minute": requests_per_minute,
                "tokens_per_minute": tokens_per_minute,
                "concurrency": concurrency,
                "share": share,
                "priority_range": priority_range,
            },
            KeyRecord,
        )
    except msgspec.ValidationError as error:
        raise _refusal(error, name) from error
    write_keys(path, (*records, made))
    click.echo(key)


def _refusal(error: Exception, name: str) -> ConfigError:
    """Names the flag that led to a refused record."""
    reason, _, field = str(error).partition(" - at `$.")
    if field == "name`":
        return ConfigError(
            "a key's name must be 1 to 64 letters, digits and . _ @ - and begin with a letter or a"
            f" digit, got {name!r}"
        )
    flag = field.rstrip("`").replace("_", "-")
    return ConfigError(f"--{flag} has a value that cannot be: {reason[:1].lower()}{reason[1:]}")


@keys.command()
@click.argument("name")
@_FILE
def remove(name: str, path: Path) -> None:
    """Take the key of NAME out of the file."""
    from vllmx_server.limits.key_records import write_keys

    records = _read(path)
    rest = tuple(record for record in records if record.name != name)
    if len(rest) == len(records):
        known = ", ".join(record.name for record in records) or "none"
        raise ConfigError(f"{path} has no key for {name!r}; it has: {known}")
    write_keys(path, rest)


@keys.command("list")
@_FILE
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def list_keys(path: Path, as_json: bool) -> None:
    """List whose keys there are and what they may do."""
    import msgspec

    records = [msgspec.to_builtins(record) for record in _read(path)]
    if as_json:
        click.echo(json.dumps(records, indent=1))
        return
    for record in records:
        name = record.pop("name")
        del record["sha256"]
        told = (
            f"{key} {(' '.join(value) or 'none') if isinstance(value, (list, tuple)) else value}"
            for key, value in record.items()
        )
        limits = ", ".join(told) or "no limits"
        click.echo(f"{name}  {limits}")


def _read(path: Path) -> tuple[KeyRecord, ...]:
    from vllmx_server.limits.key_records import read_keys

    records = read_keys(path, "--file")
    warn_of_readers(path, "--file")
    return records
