"""The `vllmx` command. Sub-commands are imported when they are called, so that help is instant."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from importlib import import_module

import click
from vllmx_core.config_values import nearest
from vllmx_core.plugins.specs import CommandSpec
from vllmx_core.system.environment import PREFIX, warnings

BUILT_IN: Mapping[str, tuple[str, str]] = {
    "serve": ("vllmx.cli.serve:serve", "Serve a model over the OpenAI HTTP API."),
    "chat": ("vllmx.cli.chat:chat", "Chat with a model in the terminal."),
    "complete": ("vllmx.cli.complete:complete", "Complete prompts from flags, a file or stdin."),
    "run-batch": ("vllmx.cli.run_batch:run_batch", "Answer a file of OpenAI's batch API."),
    "bench": ("vllmx.cli.bench:bench", "Measure throughput, latency, serving and start-up."),
    "plan": ("vllmx.cli.plan:plan", "Show what a model needs and how fast it will be."),
    "tune": (
        "vllmx.cli.tune:tune",
        "Measure which settings keep a promise of latencies at the highest rate.",
    ),
    "rank": ("vllmx.cli.rank:rank", "Run ranks of a model for a server on another host."),
    "quantize": ("vllmx.cli.quantize:quantize", "Write a model to a GGUF file with fewer bits."),
    "top": ("vllmx.cli.top:top", "Show what a running server does."),
    "parsers": (
        "vllmx.cli.parsers:parsers",
        "Show how a model's tool calls and thoughts are read.",
    ),
    "keys": ("vllmx.cli.keys:keys", "Make API keys with rights and limits, and list them."),
    "models": ("vllmx.cli.models:models", "List the architectures that can be served."),
    "plugins": ("vllmx.cli.plugins:plugins", "List plugins and what they provide."),
    "completion": ("vllmx.cli.completion:completion", "Print completion for bash, zsh or fish."),
    "env": ("vllmx.cli.env:env", "Print what a bug report needs."),
}


_COMMANDS = "vllmx.cli.group.commands"


class Commands(click.Group):
    """Built-in commands by name, then those of plugins; nothing is imported before it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BUILT_IN, *sorted(_plugin_commands(ctx))]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in BUILT_IN:
            module_name, _, attribute = BUILT_IN[name][0].partition(":")
            command: click.Command = getattr(import_module(module_name), attribute)
            return command
        found = _plugin_commands(ctx).get(name)
        if found is None:
            return None
        loaded: click.Command = found.load()
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = [*BUILT_IN, *_plugin_commands(ctx)] if args[0] not in BUILT_IN else [args[0]]
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = nearest(args[0], known) or f"; known: {', '.join(known)}"
            raise click.UsageError(f"there is no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, text) in BUILT_IN.items()]
        rows += [(name, spec.help) for name, spec in sorted(_plugin_commands(ctx).items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _plugin_commands(ctx: click.Context) -> dict[str, CommandSpec]:
    """Commands of plugins by name. They are loaded once for a command line, so that a broken plugin
    is reported once."""
    if _COMMANDS not in ctx.meta:
        from vllmx_core.plugins.registry import load_registry

        ctx.meta[_COMMANDS] = {spec.name: spec for spec in load_registry().all(CommandSpec)}
    found: dict[str, CommandSpec] = ctx.meta[_COMMANDS]
    return found


def _warn_of_unknown_variables() -> None:
    """Warns on standard error of each VLLMX_ variable that nothing reads."""
    given = [name for name in os.environ if name.startswith(PREFIX)]
    if not given:
        return
    from importlib.metadata import entry_points, requires

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
        with contextlib.suppress(OSError):  # standard error is closed
            click.echo(f"warning: {line}", err=True)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="With no MODEL, the commands use the small demo model that ships with vllmx.",
)
@click.version_option(package_name="vllmx", message="vllmx %(version)s")
def cli() -> None:
    """Serves large language models on CPUs and GPUs."""
    _warn_of_unknown_variables()
