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
    from rich.console import Console
    from rich.table import Table

    table = Table("plugin", "version", "provides", title=None)
    for plugin in found:
        provides = "\n".join(plugin.provides) if plugin.error is None else f"failed: {plugin.error}"
        table.add_row(
            plugin.key, plugin.version, provides, style=None if plugin.error is None else "red"
        )
    Console().print(table)
    if any(plugin.error for plugin in found):
        raise SystemExit(1)
