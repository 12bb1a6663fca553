"""`vllmx plugins`: what is installed, what it provides, and what failed."""

from __future__ import annotations

import dataclasses
import json

import click
from vllmx_core.registry import load_registry


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def plugins(as_json: bool) -> None:
    """List plugins and what they provide."""
    found = load_registry().plugins
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(plugin) for plugin in found], indent=1))
        return
    width = max((len(plugin.key) for plugin in found), default=0)
    for plugin in found:
        provides = plugin.provides or ("nothing",)
        lines = provides if plugin.error is None else (f"failed: {plugin.error}",)
        color = None if plugin.error is None else "red"
        for index, line in enumerate(lines):
            key, version = (plugin.key, plugin.version) if index == 0 else ("", "")
            click.secho(f"{key:<{width}}  {version:<8}  {line}", fg=color)
    if any(plugin.error for plugin in found):
        raise SystemExit(1)
