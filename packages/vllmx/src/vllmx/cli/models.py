"""`vllmx models`: the architectures that can be served here, in which files they come, the backends
that run them and what was checked."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import ModelSpec, QuantizationSpec
from vllmx_core.records import Record


class Architecture(Record):
    """One line of the list."""

    model_type: str
    """The `model_type` of config.json; "-" if only `architectures` identifies it."""
    architectures: tuple[str, ...]
    """Names that `architectures` in config.json may have."""
    gguf: tuple[str, ...]
    """Values of `general.architecture` in GGUF files; empty: such files are not read."""
    formats: tuple[str, ...]
    """The formats of files: safetensors, the installed quantisations of it, and gguf."""
    backends: tuple[str, ...]
    """Backends that have all its ops; empty: its plugin does not name any."""
    checked: tuple[str, ...]
    """Properties that its plugin's tests compare."""
    plugin: str
    """Distribution and entry point that provide it."""


def architectures() -> list[Architecture]:
    """Lists what the installed plugins provide, by architecture."""
    registry = load_registry()
    quantised = tuple(sorted(spec.name for spec in registry.all(QuantizationSpec)))
    found = []
    for key, spec in registry.provided(ModelSpec):
        gguf = (*spec.gguf_names, *spec.gguf_among)
        found.append(
            Architecture(
                ", ".join(spec.model_types) or "-",
                spec.architectures,
                gguf,
                ("safetensors", *quantised, *(("gguf",) if gguf else ())),
                spec.backends,
                spec.checked,
                key,
            )
        )
    return sorted(found, key=lambda one: (one.architectures, one.plugin))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def models(as_json: bool) -> None:
    """List the architectures that can be served, with the names that files give them."""
    found = architectures()
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    rows = [("MODEL TYPE", "ARCHITECTURE", "GGUF", "BACKENDS", "CHECKED", "FROM")]
    rows += [(one.model_type, *cells(one), one.plugin) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        padded = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*padded, row[5]]))


def cells(one: Architecture) -> tuple[str, str, str, str]:
    """Architecture, GGUF, backends and what was checked, as tables show them."""
    listed = (one.architectures, one.gguf, one.backends, one.checked)
    architecture, gguf, backends, checked = (", ".join(words) or "-" for words in listed)
    return architecture, gguf, backends, checked
