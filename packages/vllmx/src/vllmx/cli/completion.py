"""`vllmx completion`: what a shell needs to complete commands, flags and values."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": '~/.bashrc: eval "$(vllmx completion bash)"',
    "zsh": '~/.zshrc: eval "$(vllmx completion zsh)"',
    "fish": "~/.config/fish/config.fish: vllmx completion fish | source",
}


@click.command(epilog="\b\n" + "\n".join(WHERE.values()))
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print completion for SHELL; your shell's start file evaluates it."""
    from click.shell_completion import get_completion_class

    from vllmx.cli.group import cli

    found = get_completion_class(shell)
    assert found is not None, "click has all three"
    click.echo(found(cli, {}, "vllmx", "_VLLMX_COMPLETE").source())
