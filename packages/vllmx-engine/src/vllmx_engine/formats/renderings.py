"""Renders an assistant's turn: conversations of words that occur nowhere else go through the chat
template, and the turn is cut out of the prompt."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from vllmx_core.errors import VllmxError, excerpt
from vllmx_core.records import Record

from vllmx_engine.formats.writer import WrittenCall
from vllmx_engine.text.chat_template import ChatTemplate

NAMES = ("zqnamea", "zqnameb", "zqnamec")
KEYS = ("zqkeya", "zqkeyb")
VALUES = ("zqvala", "zqvalb")
CONTENT = "Zqcontent"
REASONING = "Zqreasoning"
_PARAMETERS = {
    "type": "object",
    "properties": {key: {"type": "string", "description": "d"} for key in KEYS},
    "required": [],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": _PARAMETERS},
    }
    for name in NAMES
]
USER = "Zquser"
MODES: tuple[Mapping[str, Any], ...] = (
    {},
    {"reasoning_effort": "high"},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)
"""Template variables that turn thoughts on and off."""
_ENOUGH_CPU_S = 5.0
"""CPU time for all renderings of a template. A template that is not hostile needs a tenth of it."""
_MOST_RENDERINGS = 200
_LAST_TAG = re.compile(r"(?:<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\])$")


class NotDerivedError(Exception):
    """Why a template does not tell how answers are written, in words."""


class Answer(Record):
    """A template's rendering of one answer."""

    prompt: str
    """The conversation before it, with the generation prompt, from the user's last words on."""
    text: str
    """The text behind the prompt, up to the end of the turn."""
    unopened: str = ""
    """The end of the prompt that the template leaves out in front of an answer of the past."""
    thinks: bool = True
    """Thoughts are not turned off."""


class Renderings:
    """Turns of an assistant as one template writes them behind its own generation prompt.

    Raises (constructor): NotDerivedError where it does not write plain answers.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._eos = template.special_tokens.get("eos_token", "")
        self._rendered: dict[tuple[str, int], str | NotDerivedError] = {}
        self._spent_s = 0.0
        self._ends: dict[int, str] = {}
        self._tools: list[dict[str, Any]] | None = TOOLS
        self._header = ""
        try:
            self._plain = self.answer({"content": CONTENT}).text
        except NotDerivedError:  # the template may fail only with tools
            self._tools = None
            self._rendered.clear()
            self._plain = self.answer({"content": CONTENT}).text
        if self._always_prompts({}):  # or never: then an answer excludes the header of its turn
            self._header = self._plain.partition(CONTENT)[0]
            self._plain = self._plain.removeprefix(self._header)

    def calls(self, calls: Sequence[WrittenCall], content: str = "") -> str:
        """Returns an answer with calls, without the end of the turn. Raises NotDerivedError for a
        conversation that the template refuses."""
        found = self.answer({"content": content, "tool_calls": openai_calls(calls)})
        shared = common_prefix(found.text, self._plain)
        shared = shared[: len(shared) - len(open_tag(shared))]
        return found.text if content else found.text.removeprefix(shared)

    def thoughts(self, reasoning: str, content: str) -> str:
        """A whole conversation that ends with thoughts and content, without the end of the turn."""
        turn = {"content": content, "reasoning_content": reasoning}
        end = self.end({})
        return self._render(turn, {}, is_prompt=False).rstrip().removesuffix(end)

    @cached_property
    def modes(self) -> list[Mapping[str, Any]]:
        """The members of `MODES` that change what the template writes."""
        found: dict[str, Mapping[str, Any]] = {}
        for mode in MODES:
            try:
                prompt = self._render(None, mode, is_prompt=True)
                whole = self._render({"content": CONTENT}, mode, is_prompt=False)
            except NotDerivedError:
                continue
            found.setdefault(_from_user(prompt) + _from_user(whole), mode)
        return list(found.values())

    def answer(self, turn: Mapping[str, Any], mode: Mapping[str, Any] | None = None) -> Answer:
        """An answer behind its generation prompt. Raises NotDerivedError."""
        mode = mode or {}
        prompt = _from_user(self._render(None, mode, is_prompt=True))
        whole = _from_user(self._render(turn, mode, is_prompt=False))
        shared = common_prefix(prompt, whole)
        if not prompt[len(shared) :].isspace():
            shared = shared[: len(shared) - len(open_tag(shared))]
        text = self._without_end(whole[len(shared) :], mode).removeprefix(self._header)
        if len(turn.get("tool_calls") or ()) > 1:
            between = text.partition(NAMES[0])[2].rpartition(NAMES[1])[0]
            if self.end(mode) and self.end(mode) in between:
                raise NotDerivedError("it writes one call in a turn")
        return Answer(prompt, text, prompt[len(shared) :], bool(mode.get("thinking", True)))

    def _without_end(self, text: str, mode: Mapping[str, Any]) -> str:
        end, ends_early = self.end(mode), bool(self._eos) and self._eos in text
        if ends_early:
            text, end = text.partition(self._eos)[0], end.partition(self._eos)[0].rstrip()
        found = text.rstrip()
        if not end or ends_early or found.endswith(end):
            return found.removesuffix(end)
        # calls end a turn in another way than contents do
        tag = _LAST_TAG.search(found)
        return text if tag is None else found[: tag.start()]

    def end(self, mode: Mapping[str, Any]) -> str:
        """The end of a turn, without white space around it."""
        key = MODES.index(mode)
        if key not in self._ends:
            plain = _from_user(self._render({"content": CONTENT}, mode, is_prompt=False))
            prompt = _from_user(self._render(None, mode, is_prompt=True)).rstrip()
            if CONTENT not in plain:
                raise NotDerivedError("it leaves out an answer's content")
            end = plain[plain.rfind(CONTENT) + len(CONTENT) :].strip()
            self._ends[key] = self._turn_end(end, prompt, mode)
        return self._ends[key]

    def _turn_end(self, end: str, prompt: str, mode: Mapping[str, Any]) -> str:
        """Returns the part of the text behind a content that ends the turn."""
        turn = {"content": "", "tool_calls": openai_calls([call(0, {KEYS[0]: VALUES[0]})])}
        try:
            calls = self._render(turn, mode, is_prompt=False)
        except NotDerivedError:
            calls = ""
        if NAMES[0] in calls.rpartition(USER)[2] and calls.rstrip().endswith(end):
            return end  # calls end in the same way
        behind = ""
        if self._always_prompts(mode):
            behind = common_prefix(end[::-1], prompt[::-1])[::-1]
            behind = behind if behind == end else without_rest(behind)
            if behind and prompt == USER + behind:
                return behind  # the user's turn ends in the same way
        rest = end.removesuffix(behind)
        tag = _LAST_TAG.search(rest.rstrip())
        return end if tag is None else rest[tag.start() :] + behind

    def _always_prompts(self, mode: Mapping[str, Any]) -> bool:
        """True if the template always writes the generation prompt."""
        prompts = [self._render(None, mode, is_prompt=each) for each in (True, False)]
        return prompts[0] == prompts[1]

    def _render(
        self, turn: Mapping[str, Any] | None, mode: Mapping[str, Any], *, is_prompt: bool
    ) -> str:
        """A conversation that ends with the generation prompt, or with a turn of the assistant."""
        key = json.dumps([turn, is_prompt]), MODES.index(mode)
        if key not in self._rendered:
            self._rendered[key] = self._rendering(turn, mode, is_prompt=is_prompt)
        found = self._rendered[key]
        if isinstance(found, NotDerivedError):
            raise found
        return found

    def _rendering(
        self, turn: Mapping[str, Any] | None, mode: Mapping[str, Any], *, is_prompt: bool
    ) -> str | NotDerivedError:
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": USER}]
        if turn is not None:
            messages.append({"role": "assistant", **turn})
        if len(self._rendered) >= _MOST_RENDERINGS or self._spent_s > _ENOUGH_CPU_S:
            return NotDerivedError("it takes too long")
        start = time.thread_time()
        try:
            return self._template.render(
                messages, self._tools, add_generation_prompt=is_prompt, chat_template_kwargs=mode
            )
        except VllmxError as error:
            return NotDerivedError(f"it fails: {excerpt(error.message)}")
        finally:
            self._spent_s += time.thread_time() - start


def _from_user(text: str) -> str:
    """Returns a conversation from the user's last words on: the text before them does not matter,
    and may hold the time."""
    at = text.rfind(USER)
    if at < 0:
        raise NotDerivedError("it leaves out what the user says")
    return text[at:]


def openai_calls(calls: Sequence[WrittenCall]) -> list[dict[str, Any]]:
    """Calls as a message holds them."""
    return [
        {
            "id": each.id,
            "type": "function",
            "function": {"name": each.name, "arguments": dict(each.arguments)},
        }
        for each in calls
    ]


def without_rest(text: str) -> str:
    """A text without the rest of a tag that began before it."""
    closing, opening = text.find(">"), text.find("<")
    return text[closing + 1 :] if closing >= 0 and (opening < 0 or closing < opening) else text


def common_prefix(left: str, right: str) -> str:
    """The beginning that two texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    size = next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
    return left[:size]


def open_tag(text: str) -> str:
    """The beginning of a tag at the end of a text, whose rest is elsewhere."""
    at = max(text.rfind("<"), text.rfind("["))
    closing = ">" if text[at : at + 1] == "<" else "]"
    tail = text[at:] if at >= 0 else ""
    return tail if tail and closing not in tail and " " not in tail and "\n" not in tail else ""


def call(number: int, arguments: Mapping[str, Any] | None = None) -> WrittenCall:
    """A call whose name and id occur nowhere else."""
    return WrittenCall(NAMES[number], arguments or {}, f"zqid0000{number}")
