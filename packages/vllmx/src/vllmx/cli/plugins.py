"""`vllmx plugins`: what is installed, what it provides, and what failed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence

import click
from vllmx_core.plugins.registry import PluginInfo, Registry, load_registry
from vllmx_core.plugins.specs import CommandSpec


@click.command()
@click.option("--prefer", multiple=True, help="Plugin that serves what another provides too.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def plugins(prefer: tuple[str, ...], as_json: bool) -> None:
    """List plugins, what they provide, what failed and which names are in conflict.

    Exit code 1 where a plugin failed or nobody serves a name that two provide.
    """
    registry = load_registry()
    chosen = prefer or tuple(filter(None, os.environ.get("VLLMX_PREFER", "").split(",")))
    registry.prefer(chosen)
    found = registry.plugins
    conflicts, notes = registry.conflicts()
    notes += _shadowed(registry)
    if as_json:
        listed = [dataclasses.asdict(plugin) for plugin in found]
        click.echo(
            json.dumps({"plugins": listed, "conflicts": conflicts, "notes": notes}, indent=1)
        )
    else:
        _print(found)
        for line in conflicts:
            click.secho(f"conflict: {line}", fg="red")
        for line in notes:
            click.echo(f"note: {line}")
    if conflicts or any(plugin.error for plugin in found):
        raise SystemExit(1)


def _shadowed(registry: Registry) -> list[str]:
    """Commands of plugins that are hidden by vllmx's own of the same name."""
    from vllmx.cli.group import BUILT_IN

    return [
        f"command {spec.name!r} of {key} is vllmx's own: rename it in the plugin"
        for key, spec in registry.provided(CommandSpec)
        if spec.name in BUILT_IN
    ]


def _print(found: Sequence[PluginInfo]) -> None:
    width = max((len(plugin.key) for plugin in found), default=0)
    for plugin in found:
        provides = plugin.provides or ("nothing",)
        lines = provides if plugin.error is None else (f"failed: {plugin.error}",)
        color = None if plugin.error is None else "red"
        for index, line in enumerate(lines):
            key, version = (plugin.key, plugin.version) if index == 0 else ("", "")
            click.secho(f"{key:<{width}}  {version:<8}  {line}", fg=color)
