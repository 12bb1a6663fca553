"""Tells of environment variables that look like ours and are not, whatever the command."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from importlib.metadata import entry_points, requires

import click
from vllmx_core.system.environment import PREFIX, warnings


def warn_of_unknown_variables() -> None:
    """One line on standard error for each; nothing is imported where there is no variable."""
    given = [name for name in os.environ if name.startswith(PREFIX)]
    if not given:
        return
    from vllmx_core.config import EngineConfig
    from vllmx_core.plugins.hooks import GROUP
    from vllmx_core.plugins.registry import plugin_key
    from vllmx_server.config import ServerConfig

    fields = {
        field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)
    }
    ours = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requires("vllmx") or ()}
    plugins = {plugin_key(point).partition(":")[0] for point in entry_points(group=GROUP)}
    for line in warnings(given, fields, plugins - ours):
        with contextlib.suppress(OSError):  # nobody can be told
            click.echo(f"warning: {line}", err=True)
