"""`vllmx chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import VllmxError
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import (
    engine_options,
    log_level_option,
    resolve,
    sampling_options,
    take_sampling,
)

if TYPE_CHECKING:
    from vllmx_server.mcp.servers import ToolServers

    from vllmx.chat_history import LineEditor


@click.command(cls=ModelCommand)
@engine_options
@sampling_options
@click.option("--system", help="System message.")
@click.option("--i", "always", is_flag=True, hidden=True, help="Accepted: chat is interactive.")
@click.option("--history/--no-history", default=True, help="Keep what is typed over sessions.")
@click.option("--no-thinking", is_flag=True, help="Ask the template to switch thinking off.")
@click.option("--mcp", metavar="FILE", help="JSON file of MCP servers whose tools may be called.")
@log_level_option("warning")
def chat(
    system: str | None,
    always: bool,
    history: bool,
    no_thinking: bool,
    mcp: str | None,
    log_level: str,
    **flags: Any,
) -> None:
    """Chat with MODEL. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

    A paste of several lines is one question; a backslash at the end of a line goes on.
    """
    configure_logging(log_level)
    sampling = take_sampling(flags)
    (config,) = resolve((EngineConfig,), flags)
    with ExitStack() as stack:
        servers = None if mcp is None else _servers(mcp, stack)
        _chat(config, sampling, system, history, no_thinking, servers)


def _servers(path: str, stack: ExitStack) -> ToolServers:
    """Started: they come up while the model loads."""
    from vllmx_server.mcp.settings import read_servers

    settings = read_servers(path, "--mcp", warns=True)
    from vllmx_server.mcp.servers import ToolServers

    servers = ToolServers(settings)
    stack.callback(servers.close)
    return servers


def _chat(
    config: EngineConfig,
    sampling: dict[str, Any],
    system: str | None,
    history: bool,
    no_thinking: bool,
    servers: ToolServers | None,
) -> None:
    from vllmx_engine.engine import Engine

    from vllmx.chat_history import LineEditor, history_path
    from vllmx.chat_tools import ChatTools
    from vllmx.terminal_chat import Conversation

    interactive = sys.stdin.isatty()
    editor = LineEditor(history_path() if interactive and history else None)
    with Engine(config) as engine, closing(editor):
        arguments = {"enable_thinking": False} if no_thinking else {}
        tools = None if servers is None else ChatTools(servers, arguments)
        for fault in [] if tools is None else tools.wait():
            click.secho(fault, fg="yellow", err=True)
        talk = Conversation(engine, sampling, system, arguments, tools)
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
    from vllmx.chat_tools import Aside

    started = time.perf_counter()
    try:
        for piece in talk.answer(text):
            click.secho(piece, nl=False, dim=isinstance(piece, Aside))
        click.echo()
        rate = talk.generated_tokens / max(time.perf_counter() - started, 1e-9)
        click.secho(f"{talk.generated_tokens} tokens, {rate:.1f} tokens/s", dim=True)
        if talk.is_full:
            click.secho(f"the context is full: {talk.MAKE_ROOM}", fg="yellow")
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True)
    except VllmxError as error:
        click.secho(error.message, fg="red")
