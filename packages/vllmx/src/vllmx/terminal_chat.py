"""The conversation behind `vllmx chat`: history and /commands, without a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError, ContextLengthError, VllmxError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.engine import Engine

from vllmx.chat_tools import (
    MAX_ROUNDS,
    Aside,
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
/quit                 leave"""


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
        engine: Engine,
        sampling: dict[str, Any],
        system: str | None,
        template_arguments: dict[str, Any],
        tools: ChatTools | None = None,
    ) -> None:
        self._engine = engine
        self._sampling = {"max_tokens": None, **sampling}
        self._template_arguments = template_arguments
        self._tools = tools
        self.messages: list[dict[str, Any]] = []
        self.generated_tokens = 0
        self.is_full = False
        """True if the last answer ended because the context was full."""
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str | None) -> Iterator[str]:
        """Yields the answer to a user's message (None: to the last one again) in pieces. An
        interrupted answer stays in the history; a failed question does not. Raises
        ContextLengthError, with advice for making room."""
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        if self._tools is not None:
            yield from self._answer_with_tools(self._tools)
            return
        answer: list[str] = []
        self.generated_tokens = 0
        self.is_full = False
        seq_id = None
        try:
            prompt = self._engine.apply_chat_template(self.messages, **self._template_arguments)
            params = self._engine.sampling_params(**self._sampling)
            seq_id, _, stream = self._engine.generate_stream(params, prompt)
            for piece in stream:
                answer.append(piece)
                self.generated_tokens = len(stream.token_ids)
                yield piece
            self.generated_tokens = len(stream.token_ids)
            self.is_full = stream.finish_reason == "length" and params.max_tokens is None
        except ContextLengthError as error:
            raise ContextLengthError(f"{error.message}; {self.MAKE_ROOM}") from None
        finally:
            if seq_id is None:
                self.messages.pop()
            else:
                self._engine.cancel(seq_id)
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer_with_tools(self, tools: ChatTools) -> Iterator[str]:
        """Does what `answer` does, in rounds: calls are run, and the model reads their results."""
        asked, self.generated_tokens, self.is_full = len(self.messages), 0, False
        try:
            for _ in range(MAX_ROUNDS):
                before = self.generated_tokens
                made = tools.round(self._engine, self.messages, self._sampling)
                calls = []
                try:
                    for piece in made.pieces():
                        self.generated_tokens = before + len(made.stream.token_ids)
                        yield piece
                    self.generated_tokens = before + len(made.stream.token_ids)
                    calls = made.calls()
                    results = []
                    for call, result in tools.results(calls):
                        yield shown_call(call)
                        yield shown_result(result)
                        results.append(result_message(call, result))
                except BaseException:
                    calls = []  # a chat must not end with a call without a result
                    raise
                finally:
                    self._engine.cancel(made.seq_id)
                    content = made.found.content
                    if not calls:
                        self.messages.append({"role": "assistant", "content": content})
                if not calls:
                    is_cut = made.stream.finish_reason == "length"
                    self.is_full = is_cut and made.params.max_tokens is None
                    return
                self.messages += [call_message(content, calls), *results]
            yield Aside(f"(stopped after {MAX_ROUNDS} rounds of calls)")
            self.messages.append({"role": "assistant", "content": ""})
        except ContextLengthError as error:
            del self.messages[asked - 1 :]
            raise ContextLengthError(f"{error.message}; {self.MAKE_ROOM}") from None
        except VllmxError:
            del self.messages[asked - 1 :]
            raise

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
            self._engine.sampling_params(**changed)
        except TypeError:
            near = nearest(name, [field.name for field in dataclasses.fields(SamplingParams)])
            raise ConfigError(f"there is no sampling parameter {name!r}{near}") from None
        self._sampling = changed
        return f"{name} = {changed.get(name)}"

    def _show(self) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in self.messages]
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


def _path(argument: str) -> Path:
    if not argument:
        raise ConfigError("name a file, for example /save talk.json")
    return Path(argument).expanduser()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
