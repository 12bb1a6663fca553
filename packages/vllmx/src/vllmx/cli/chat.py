"""`vllmx chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import DEMO_MODEL, EngineConfig
from vllmx_core.errors import VllmxError
from vllmx_core.records import Record
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import (
    F,
    engine_options,
    log_level_option,
    resolve,
    sampling_options,
    take_sampling,
)

if TYPE_CHECKING:
    from vllmx_server.mcp.servers import ToolServers

    from vllmx.terminal.history import LineEditor
    from vllmx.terminal.rounds import ChatModel


class ChatSettings(Record):
    """The flags of a chat that are not the model's."""

    system: str | None
    history: bool
    no_thinking: bool
    mcp: str | None
    url: str | None
    api_key: str | None

    @classmethod
    def taken_from(cls, flags: dict[str, Any]) -> ChatSettings:
        """Moves them out of a command's flags."""
        flags.pop("always")
        return cls(**{name: flags.pop(name) for name in cls.__struct_fields__})


def chat_options(command: F) -> F:
    """The flags of `vllmx chat` and `vllmx run`."""
    options = (
        engine_options,
        sampling_options,
        click.option("--system", help="System message."),
        click.option("--i", "always", is_flag=True, hidden=True, help="Accepted, without effect."),
        click.option("--history/--no-history", default=True, help="Keep input over sessions."),
        click.option("--no-thinking", is_flag=True, help="Ask the template to skip thinking."),
        click.option("--mcp", metavar="FILE", help="JSON file of MCP servers with tools."),
        click.option("--url", help="A running server to chat with; MODEL is one of its models."),
        click.option("--api-key", envvar="VLLMX_API_KEY", help="Bearer token for --url."),
        log_level_option("warning"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=ModelCommand)
@chat_options
def chat(log_level: str, **flags: Any) -> None:
    """Chat with MODEL. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

    A paste of several lines is one question; a backslash at the end of a line goes on.
    """
    configure_logging(log_level)
    settings = ChatSettings.taken_from(flags)
    sampling = take_sampling(flags)
    (config,) = resolve((EngineConfig,), flags)
    open_chat(config, sampling, settings, None)


def open_chat(
    config: EngineConfig, sampling: dict[str, Any], settings: ChatSettings, question: str | None
) -> None:
    """Loads the model and chats, or answers the only question."""
    with ExitStack() as stack:
        servers = None if settings.mcp is None else _servers(settings.mcp, stack)
        _chat(config, sampling, settings, servers, question)


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
    settings: ChatSettings,
    servers: ToolServers | None,
    question: str | None,
) -> None:
    from vllmx.terminal.conversation import COMMANDS, FILE_COMMANDS, Conversation
    from vllmx.terminal.history import LineEditor, history_path
    from vllmx.terminal.rounds import Aside
    from vllmx.terminal.tools import ChatTools

    interactive = sys.stdin.isatty()
    path = history_path() if interactive and settings.history else None
    with ExitStack() as stack:
        model = stack.enter_context(closing(_model(config, settings)))
        tools = None if servers is None else ChatTools(servers)
        for fault in [] if tools is None else tools.wait():
            click.secho(fault, fg="yellow", err=True)
        talk = Conversation(model, sampling, settings.system, tools)
        if question is not None:
            for piece in talk.answer(question):
                click.echo("" if isinstance(piece, Aside) else piece, nl=False)
            click.echo()
            return
        editor = stack.enter_context(closing(LineEditor(path, COMMANDS, FILE_COMMANDS)))
        click.echo(f"{model.title} /help lists the commands.")
        while (line := _read_line(editor, interactive)) is not None:
            if line.startswith("/"):
                if not _command(talk, line):
                    break
            elif line.strip():
                _answer(talk, line)


def _model(config: EngineConfig, settings: ChatSettings) -> ChatModel:
    arguments = {"enable_thinking": False} if settings.no_thinking else {}
    if settings.url is None:
        from vllmx.terminal.rounds import LocalModel

        return LocalModel(config, arguments)
    from vllmx.terminal.remote import RemoteModel

    name = None if config.model == DEMO_MODEL else config.name
    return RemoteModel(settings.url, settings.api_key, name, arguments)


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
        for piece in _coloured(talk.answer(text)):
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


def _coloured(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces as a terminal shows them: Markdown in colour, thoughts as one line, asides dim."""
    from vllmx.terminal.markdown import Markdown
    from vllmx.terminal.rounds import Aside, Thought

    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    markdown = Markdown() if has_colour else None
    begun_s: float | None = None
    for piece in chain(pieces, [Aside()]):  # which ends thoughts without an answer
        if isinstance(piece, Thought):
            if begun_s is None:
                begun_s = time.perf_counter()
                yield click.style("thinking ...", dim=True)
            continue
        if begun_s is not None:
            seconds, begun_s = time.perf_counter() - begun_s, None
            yield click.style(f" for {seconds:.1f} s (/thoughts shows them)\n", dim=True)
        if isinstance(piece, Aside):
            yield click.style(piece, dim=True) if piece else ""
        else:
            yield piece if markdown is None else markdown.push(piece)
    if markdown is not None:
        yield markdown.finish()
