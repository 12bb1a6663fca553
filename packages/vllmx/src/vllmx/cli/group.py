"""The `vllmx` command. Sub-commands are imported when they are called, so that help is instant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

import click
from vllmx_core.config_values import nearest
from vllmx_core.plugins.specs import CommandSpec

BUILT_IN: Mapping[str, tuple[str, str]] = {
    "serve": ("vllmx.cli.serve:serve", "Serve a model over the OpenAI HTTP API."),
    "chat": ("vllmx.cli.chat:chat", "Chat with a model in the terminal."),
    "complete": ("vllmx.cli.complete:complete", "Complete prompts from flags, a file or stdin."),
    "run": ("vllmx.cli.run:run", "Download a model if necessary, and chat with it."),
    "pull": ("vllmx.cli.pull:pull", "Download a model."),
    "list": ("vllmx.cli.cached:list_models", "List downloaded models, or short names."),
    "show": ("vllmx.cli.cached:show", "Show a model's architecture, size and settings."),
    "rm": ("vllmx.cli.cached:rm", "Delete downloaded models."),
    "replicas": (
        "vllmx.cli.replicas:replicas",
        "List, drain and add the replicas of a running server.",
    ),
    "ps": ("vllmx.cli.ps:ps", "List the models of a running server."),
    "run-batch": ("vllmx.cli.run_batch:run_batch", "Answer a file of OpenAI's batch API."),
    "bench": ("vllmx.cli.bench:bench", "Measure throughput, latency, serving and start-up."),
    "plan": ("vllmx.cli.plan:plan", "Show what a model needs and how fast it will be."),
    "tune": (
        "vllmx.cli.tune:tune",
        "Measure which settings keep a promise of latencies at the highest rate.",
    ),
    "rank": ("vllmx.cli.rank:rank", "Run ranks of a model for a server on another host."),
    "core": ("vllmx.cli.core:core", "Run a model for servers on other hosts."),
    "quantize": ("vllmx.cli.quantize:quantize", "Write a model to a GGUF file with fewer bits."),
    "top": ("vllmx.cli.top:top", "Show what a running server does."),
    "parsers": (
        "vllmx.cli.parsers:parsers",
        "Show how a model's tool calls and thoughts are read.",
    ),
    "keys": ("vllmx.cli.keys:keys", "Make API keys with rights and limits, and list them."),
    "models": ("vllmx.cli.models:models", "List the architectures that can be served."),
    "plugins": ("vllmx.cli.plugins:plugins", "List plugins and what they provide."),
    "completion": ("vllmx.cli.group:completion", "Print completion for bash, zsh or fish."),
    "doctor": ("vllmx.cli.doctor:doctor", "Check this machine, a model or a server."),
    "env": ("vllmx.cli.env:env", "Print what a bug report needs."),
}


_COMMANDS = "vllmx.cli.group.commands"
SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": '~/.bashrc: eval "$(vllmx completion bash)"',
    "zsh": '~/.zshrc: eval "$(vllmx completion zsh)"',
    "fish": "~/.config/fish/config.fish: vllmx completion fish | source",
}


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
    """Commands of plugins by name, loaded once, so that a broken plugin is reported once."""
    if _COMMANDS not in ctx.meta:
        from vllmx_core.plugins.registry import load_registry

        ctx.meta[_COMMANDS] = {spec.name: spec for spec in load_registry().all(CommandSpec)}
    found: dict[str, CommandSpec] = ctx.meta[_COMMANDS]
    return found


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="With no MODEL, the commands use the small demo model that ships with vllmx.",
)
@click.version_option(package_name="vllmx", message="vllmx %(version)s")
def cli() -> None:
    """Serves large language models on CPUs and GPUs."""
    if any(name.startswith("VLLMX_") for name in os.environ):
        from vllmx.cli.variables import warn_of_unknown

        warn_of_unknown(os.environ)


@click.command(epilog="\b\n" + "\n".join(WHERE.values()))
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print completion for SHELL; your shell's start file evaluates it."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click has all three"
    click.echo(found(cli, {}, "vllmx", "_VLLMX_COMPLETE").source())
