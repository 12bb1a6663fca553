"""Error output and exit codes of the command line."""

from __future__ import annotations

import signal

import click
from vllmx_core.errors import EngineDeadError, VllmxError

FAILED, WRONG, INTERRUPTED = 1, 2, 128 + signal.SIGINT


def run(command: click.Command, arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. 0: done; 1: vllmx or a device failed; 2: wrong
    arguments or input; 130: Ctrl-C. Other exceptions are bugs and pass through."""
    try:
        code = command.main(arguments, prog_name="vllmx", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        show(error.format_message(), _usage(error))
        return WRONG
    except VllmxError as error:
        show(error.message)
        return FAILED if isinstance(error, EngineDeadError) else WRONG
    except SystemExit as end:  # the command's own exit code
        code = end.code
    return code if isinstance(code, int) else 0


def show(message: str, hint: str = "") -> None:
    """Prints an error and a hint on standard error."""
    label = click.style("error:", fg="red", bold=True)
    if message.partition(" ")[0][1:].islower():  # a word, and not the name of a class
        message = message[0].lower() + message[1:]
    click.echo(f"{label} {message}{hint}", err=True)


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or "-h" not in context.help_option_names:
        return ""
    return f"\n  `{context.command_path} --help` says more"
