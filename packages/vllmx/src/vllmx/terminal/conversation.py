"""The conversation behind `vllmx chat`: history and /commands, without a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError, ContextLengthError, VllmxError
from vllmx_core.sampling import SamplingParams

from vllmx.terminal.attachments import file_part, image_part, url_part
from vllmx.terminal.rounds import Aside, ChatModel
from vllmx.terminal.tools import (
    MAX_ROUNDS,
    ChatTools,
    call_message,
    result_message,
    shown_call,
    shown_result,
)

HELP = """\
/help                 this list
/reset                forget the conversation
/system TEXT          set the system message and start anew
/undo                 take back the last question and answer
/again                answer the last question again
/set NAME VALUE       set a sampling parameter, e.g. /set temperature 0.2; VALUE none unsets it
/show                 show the conversation and the parameters
/save FILE            write the conversation as JSON
/load FILE            read one
/image FILE           attach an image to the next question
/file FILE            attach a text file
/url URL              attach the text of a web page, or an image
/tools                list the tools of MCP servers; on, off
/thoughts             show what the model thought before its last answer
/speculate DRAFTER    load the model with another drafter: ngram, suffix, twin, auto, off
/quit                 leave"""


COMMANDS = tuple(line.split()[0] for line in HELP.splitlines())
FILE_COMMANDS = ("/image", "/file", "/save", "/load")
_KEYS = {"role", "content", "tool_calls", "name", "tool_call_id"}
"""The keys of a message in a file."""


class Conversation:
    """Messages so far, and the user's changes of sampling.

    Args:
        tools: the tools that the model may call, or None.
    """

    AGAIN = "again"
    MAKE_ROOM = "/undo takes back the last question, /reset forgets the conversation"

    def __init__(
        self,
        model: ChatModel,
        sampling: dict[str, Any],
        system: str | None,
        tools: ChatTools | None = None,
    ) -> None:
        self._model = model
        self._sampling = {"max_tokens": None, **sampling}
        self._tools = tools
        self._attached: list[dict[str, Any]] = []
        self._thoughts = ""
        self.messages: list[dict[str, Any]] = []
        self.generated_tokens = 0
        self.is_full = False
        """True if the last answer ended because the context was full."""
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str | None) -> Iterator[str]:
        """Yields the answer to a user's message (None: to the last one again) in pieces: in rounds,
        if the model calls tools and reads their results. An interrupted answer stays in the
        history; a failed question does not. Raises ContextLengthError, with advice for making
        room."""
        attached = self._attached
        if text is not None:
            self.messages.append({"role": "user", "content": self._with_attached(text)})
            self._attached = []
        asked, self.generated_tokens, self.is_full = len(self.messages), 0, False
        self._thoughts = ""
        try:
            for _ in range(MAX_ROUNDS):
                if not (yield from self._round()):
                    return
            yield Aside(f"(stopped after {MAX_ROUNDS} rounds of calls)")
            self.messages.append({"role": "assistant", "content": ""})
        except VllmxError as error:
            del self.messages[asked - 1 :]
            self._attached = attached
            if isinstance(error, ContextLengthError):
                raise ContextLengthError(f"{error.message}; {self.MAKE_ROOM}") from None
            raise

    def _round(self) -> Generator[str, None, bool]:
        """One answer of the model. Returns True if it called tools, whose results are appended."""
        before = self.generated_tokens
        functions = [] if self._tools is None else self._tools.functions()
        made = self._model.begin(self.messages, self._sampling, functions)
        calls = []
        try:
            for piece in made.pieces():
                self.generated_tokens = before + made.num_tokens
                yield piece
            self.generated_tokens = before + made.num_tokens
            calls = made.calls() if self._tools is not None else []
            results = []
            for call, result in self._tools.results(calls) if self._tools is not None else ():
                yield shown_call(call)
                yield shown_result(result)
                results.append(result_message(call, result))
        except BaseException:
            calls = []  # a chat must not end with a call without a result
            raise
        finally:
            made.close()
            self._thoughts += made.found.reasoning
            content = made.found.content
            if not calls:
                self.messages.append({"role": "assistant", "content": content})
        if not calls:
            self.is_full = made.is_cut and self._sampling["max_tokens"] is None
            return False
        self.messages += [call_message(content, calls), *results]
        return True

    def _with_attached(self, text: str) -> str | list[dict[str, Any]]:
        """The question behind the attached parts; a text if they have no images."""
        parts = [*self._attached, {"type": "text", "text": text}]
        if all(part["type"] == "text" for part in parts):
            return "\n\n".join(part["text"] for part in parts)
        return parts

    def command(self, line: str) -> str | None:
        """Runs a /command and returns what to show; None to leave. Raises ConfigError."""
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        if name in ("quit", "exit", "bye"):
            return None
        commands: dict[str, Callable[[], str]] = {
            "help": lambda: HELP,
            "reset": self._reset,
            "system": lambda: self._set_system(argument),
            "undo": self._undo,
            "again": self._again,
            "set": lambda: self._set(argument),
            "show": self._show,
            "save": lambda: self._save(argument),
            "load": lambda: self._load(argument),
            "image": lambda: self._attach(image_part, argument),
            "file": lambda: self._attach(file_part, argument),
            "url": lambda: self._attach(url_part, argument),
            "tools": lambda: self._set_tools(argument),
            "thoughts": lambda: self._thoughts or "the last answer had no thoughts",
            "speculate": lambda: self._model.speculate(argument),
        }
        if name not in commands:
            near = nearest(name, [*commands, "quit"])
            raise ConfigError(f"unknown command /{name}{near}: /help lists the commands")
        return commands[name]()

    def _reset(self) -> str:
        first = self.messages[0] if self.messages else None
        self._begin(first["content"] if first and first["role"] == "system" else None)
        return "The conversation starts anew."

    def _set_system(self, text: str) -> str:
        self._begin(text or None)
        return "System message set." if text else "No system message."

    def _undo(self) -> str:
        self._forget_answer()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ConfigError("there is nothing to take back")
        self.messages.pop()
        return "Taken back."

    def _again(self) -> str:
        self._forget_answer()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ConfigError("there is no question to answer again")
        return self.AGAIN

    def _attach(self, make: Callable[[str], dict[str, Any]], argument: str) -> str:
        self._attached.append(make(argument))
        return f"{argument} goes with the next question ({len(self._attached)} attached)."

    def _set_tools(self, argument: str) -> str:
        if self._tools is None:
            raise ConfigError("no tools: start the chat with --mcp FILE")
        if argument not in ("", "on", "off"):
            raise ConfigError(f"say /tools, /tools on or /tools off, not {argument!r}")
        self._tools.is_on = argument != "off" if argument else self._tools.is_on
        return self._tools.listed()

    def _forget_answer(self) -> None:
        while self.messages and self.messages[-1]["role"] in ("assistant", "tool"):
            self.messages.pop()

    def _set(self, argument: str) -> str:
        name, _, text = argument.partition(" ")
        if not name or not text:
            raise ConfigError("say /set NAME VALUE, for example /set temperature 0.2")
        changed = dict(self._sampling)
        if text.strip() == "none":
            changed.pop(name, None)
            changed.setdefault("max_tokens", None)
        else:
            changed[name] = _value(text.strip())
        try:
            self._model.check(changed)
        except TypeError:
            near = nearest(name, [field.name for field in dataclasses.fields(SamplingParams)])
            raise ConfigError(f"there is no sampling parameter {name!r}{near}") from None
        self._sampling = changed
        return f"{name} = {changed.get(name)}"

    def _show(self) -> str:
        lines = [f"{each['role']}: {_plain(each['content'])}" for each in self.messages]
        return "\n".join([*lines, f"parameters: {self._sampling}"])

    def _save(self, argument: str) -> str:
        path = _path(argument)
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        return f"{len(self.messages)} messages written to {path}."

    def _load(self, argument: str) -> str:
        path = _path(argument)
        try:
            found = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is not a conversation written by /save") from None
        good = isinstance(found, list) and all(
            isinstance(m, dict) and {"role", "content"} <= set(m) <= _KEYS for m in found
        )
        if not good:
            raise ConfigError(f"{path} is not a conversation written by /save")
        self.messages = found
        return f"{len(found)} messages read."


def _plain(content: Any) -> str:
    """A message's content for people, without the bytes of images."""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "[image]") for part in content)


def _path(argument: str) -> Path:
    if not argument:
        raise ConfigError("name a file, for example /save talk.json")
    return Path(argument).expanduser()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
