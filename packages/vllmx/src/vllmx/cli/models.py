"""`vllmx models`: the architectures that can be served here, and in which files they come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import click
from vllmx_core.registry import load_registry
from vllmx_core.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """One line of the list."""

    model_type: str
    """Of config.json; "-" where the architecture alone tells it."""
    architectures: tuple[str, ...]
    """Of config.json."""
    gguf: tuple[str, ...]
    """`general.architecture` of GGUF files; none: such files are not read."""
    plugin: str
    """Distribution and entry point that provide it."""


def architectures() -> list[Architecture]:
    """What the installed plugins provide, by architecture."""
    provided = load_registry().provided(ModelSpec)
    found = [
        Architecture(", ".join(spec.model_types) or "-", spec.architectures, spec.gguf_names, key)
        for key, spec in provided
    ]
    return sorted(found, key=lambda one: (one.architectures, one.plugin))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def models(as_json: bool) -> None:
    """List the architectures that can be served, with the names that files give them."""
    found = architectures()
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    rows = [("MODEL TYPE", "ARCHITECTURE", "GGUF", "FROM")]
    rows += [
        (one.model_type, ", ".join(one.architectures), ", ".join(one.gguf) or "-", one.plugin)
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[3]]))
