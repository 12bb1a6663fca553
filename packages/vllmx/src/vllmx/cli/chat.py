"""`vllmx chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import VllmxError
from vllmx_core.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import engine_options, log_level_option, resolve
from vllmx.cli.sampling import sampling_options, take_sampling


@click.command(cls=ModelCommand)
@engine_options
@sampling_options
@click.option("--system", help="System message.")
@click.option("--i", "interactive", is_flag=True, help="Accepted; chat is always interactive.")
@click.option("--no-thinking", is_flag=True, help="Ask the template to switch thinking off.")
@log_level_option("warning")
def chat(
    system: str | None, interactive: bool, no_thinking: bool, log_level: str, **flags: Any
) -> None:
    """Chat with MODEL. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    configure_logging(log_level)
    sampling = take_sampling(flags)
    (config,) = resolve((EngineConfig,), flags)
    from vllmx_engine.engine import Engine

    from vllmx.terminal_chat import Conversation

    with Engine(config) as engine:
        arguments = {"enable_thinking": False} if no_thinking else {}
        talk = Conversation(engine, sampling, system, arguments)
        info = engine.info
        click.echo(
            f"{config.name} ({info.architecture}) on {info.backend}, context {info.max_model_len}."
            " /help lists the commands."
        )
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not _command(talk, line):
                    break
            elif line.strip():
                _answer(talk, line)


def _read_line() -> str | None:
    """The next line; a trailing backslash goes on. None at the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and a history
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        line = input(prompt)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input("  ")
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""
    return line


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
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True)
    except VllmxError as error:
        click.secho(error.message, fg="red")
