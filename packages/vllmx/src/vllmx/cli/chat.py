"""`vllmx chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import VllmxError
from vllmx_core.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import engine_options, log_level_option, resolve
from vllmx.cli.sampling import sampling_options, take_sampling

if TYPE_CHECKING:
    from vllmx.chat_history import LineEditor


@click.command(cls=ModelCommand)
@engine_options
@sampling_options
@click.option("--system", help="System message.")
@click.option("--i", "always", is_flag=True, hidden=True, help="Accepted: chat is interactive.")
@click.option("--history/--no-history", default=True, help="Keep what is typed over sessions.")
@click.option("--no-thinking", is_flag=True, help="Ask the template to switch thinking off.")
@log_level_option("warning")
def chat(
    system: str | None,
    always: bool,
    history: bool,
    no_thinking: bool,
    log_level: str,
    **flags: Any,
) -> None:
    """Chat with MODEL. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

    A paste of several lines is one question; a backslash at the end of a line goes on.
    """
    configure_logging(log_level)
    sampling = take_sampling(flags)
    (config,) = resolve((EngineConfig,), flags)
    from vllmx_engine.engine import Engine

    from vllmx.chat_history import LineEditor, history_path
    from vllmx.terminal_chat import Conversation

    interactive = sys.stdin.isatty()
    editor = LineEditor(history_path() if interactive and history else None)
    with Engine(config) as engine, closing(editor):
        arguments = {"enable_thinking": False} if no_thinking else {}
        talk = Conversation(engine, sampling, system, arguments)
        info = engine.info
        click.echo(
            f"{config.name} ({info.architecture}) on {info.backend}, context {info.max_model_len}."
            " /help lists the commands."
        )
        while (line := _read_line(editor, interactive)) is not None:
            if line.startswith("/"):
                if not _command(talk, line):
                    break
            elif line.strip():
                _answer(talk, line)


def _read_line(editor: LineEditor, interactive: bool) -> str | None:
    """The next line; a trailing backslash goes on. None at the end."""
    try:
        return editor.read(*(("> ", "  ") if interactive else ("", "")))
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""
    except UnicodeDecodeError:
        click.secho("that was not UTF-8 text", fg="red")
        return ""


def _command(talk: Any, line: str) -> bool:
    """Runs a /command; False when it is time to leave."""
    try:
        answer: str | None = talk.command(line)
    except VllmxError as error:
        answer = click.style(error.message, fg="red")
    if answer is None:
        return False
    if answer == talk.AGAIN:
        _answer(talk, None)
    else:
        click.echo(answer)
    return True


def _answer(talk: Any, text: str | None) -> None:
    started = time.perf_counter()
    try:
        for piece in talk.answer(text):
            click.echo(piece, nl=False)
        click.echo()
        rate = talk.generated_tokens / max(time.perf_counter() - started, 1e-9)
        click.secho(f"{talk.generated_tokens} tokens, {rate:.1f} tokens/s", dim=True)
        if talk.is_full:
            click.secho(f"the context is full: {talk.MAKE_ROOM}", fg="yellow")
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True)
    except VllmxError as error:
        click.secho(error.message, fg="red")
