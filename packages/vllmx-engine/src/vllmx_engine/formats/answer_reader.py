"""Thoughts, content and calls of tools of an answer, read while its text comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from functools import partial

from vllmx_core.output_format import Calls, OutputFormat
from vllmx_core.records import Record, field

from vllmx_engine.formats.call_steps import CallReader, passed_on
from vllmx_engine.formats.channel_steps import ChannelReader
from vllmx_engine.formats.cursor import Cursor, Steps, TextEndError, Triggers
from vllmx_engine.formats.events import (
    AnswerEvents,
    ContentPiece,
    Event,
)
from vllmx_engine.formats.tool_schemas import Tools


class ReadOptions(Record):
    """The parts to look for in an answer."""

    tools: Tools = field(default_factory=dict)
    """The tools of the request; without any, nothing is a call."""
    in_thinking: bool = False
    """The prompt left the thoughts open."""
    one_call: bool = False
    """Calls after the first are left out."""
    opened: bool = False
    """The prompt ends with the beginning of the first message (`OutputFormat.opened`)."""


def read_options(made_of: OutputFormat, tools: Tools, prompt: str) -> ReadOptions:
    """Returns the options for reading the answer to a prompt. The end of the prompt suffices."""
    begin = made_of.thinking.begin.strip() if made_of.thinking is not None else ""
    tail, opened = prompt.rstrip(), made_of.opened.strip()
    return ReadOptions(
        tools,
        in_thinking=bool(begin) and tail.endswith(begin),
        opened=bool(opened) and tail.endswith(opened),
    )


class AnswerReader(AnswerEvents):
    """Reads one answer. Never raises, whatever the text; the events of a text do not depend on how
    it is cut into pieces, but for where their texts are cut.

    Args:
        made_of: the model's format.
        options: of the request.
        make_id: makes the id of a call that has none.
    """

    def __init__(
        self,
        made_of: OutputFormat,
        options: ReadOptions,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        short = made_of.calls is not None and bool(options.tools) and made_of.calls.ids == "short"
        super().__init__(make_id or (short_id if short else call_id), one_call=options.one_call)
        self._format = made_of
        self._thinking = made_of.thinking
        self._calls = made_of.calls if options.tools else None
        self._options = options
        self._opened = made_of.opened if options.opened else ""
        self._content_end = made_of.content_end.strip()
        begins = (made_of.content_begin, *made_of.skipped)
        self._edges = {mark.strip() for mark in begins if mark.strip()}
        """Texts that are skipped before and behind contents and calls."""
        self._cursor = Cursor()
        self._is_cut = False
        self.in_thinking = options.in_thinking and self._thinking is not None
        self._passes = False
        """All that follows is content."""
        self._attempt = 0
        """The place where what may be a call begins."""
        self._steps = self._answer()
        next(self._steps, None)

    def push(self, text: str) -> list[Event]:
        """Returns the events that the next piece of text adds."""
        if self._passes:
            return [ContentPiece(text)] if text else []
        if not self._cursor.passes(text):
            self._cursor.add(text)
            next(self._steps, None)
        return self.taken()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Returns the last events at the end of the text; `is_cut`: the model was not done."""
        self._is_cut = is_cut
        if not self._passes:
            self._cursor.end(is_cut)
            next(self._steps, None)
        return self.taken()

    @property
    def calls_tools(self) -> bool:
        """True if the answer asks for calls. A call that a stop string cut is not meant to run."""
        return self.num_calls > 0 and not (self._is_cut and self._ends_within_call)

    # --- the answer -----------------------------------------------------------------------------
    def _answer(self) -> Steps[None]:
        channels = self._format.channels
        self._cursor.add(self._opened)
        try:
            if channels is not None:
                yield from ChannelReader(channels, self._options.tools, self._cursor, self).read()
            if not self.in_thinking:
                self.in_thinking = yield from self._begins_thinking()
            if self.in_thinking:
                yield from self._reasoning()
                yield from self._cursor.space()
            yield from self._content()
        except TextEndError:
            return

    def _begins_thinking(self) -> Steps[bool]:
        """True if the answer begins with reasoning. Passes its marker, and an end marker without a
        beginning."""
        if self._thinking is None or not self._thinking.begin.strip():
            return False
        cursor, start = self._cursor, self._cursor.at
        try:
            if (yield from cursor.take(self._thinking.begin)):
                return True
            if (yield from cursor.take(self._thinking.end)):
                yield from cursor.space()
                return False
        except TextEndError:
            cursor.at = cursor.at if _is_whole(cursor.text[start:], self._thinking.end) else start
            self._rest()
            raise
        cursor.at = start
        return False

    def _reasoning(self) -> Steps[None]:
        assert self._thinking is not None
        self.begin_reasoning()
        yield from self._cursor.space()
        calls = self._calls
        begin = calls.trigger if calls is not None and calls.end_thoughts else ""
        ends = Triggers((self._thinking.end.split()[0], begin))
        word = yield from passed_on(self._cursor, ends, self.reasoning)
        if word != begin:
            yield from self._cursor.take(self._thinking.end)
        self.end_reasoning()

    def _content(self) -> Steps[None]:
        calls = self._calls
        if calls is not None and calls.is_bare:
            yield from self._bare(calls)
            return
        triggers = self._triggers(calls)
        if not triggers.words:
            self._rest()
            self._passes = True
            return
        while True:
            word = yield from passed_on(self._cursor, triggers, self.content)
            if (yield from self._structure(word, triggers)):
                self._has_content = False
                yield from self._cursor.space()

    def _triggers(self, calls: Calls | None) -> Triggers:
        """The words that may begin something other than content."""
        words = {*self._edges, self._content_end, calls.trigger if calls else ""}
        if self._format.opened and self._thinking is not None:
            words.add(self._thinking.begin.strip())
        return Triggers((*words, self._opened.strip()))

    def _structure(self, word: str, triggers: Triggers) -> Steps[bool]:
        """Passes what a word begins, or the word itself as content; whether it was structure."""
        cursor, calls, start = self._cursor, self._calls, self._cursor.at
        opened, self._opened = self._opened, ""
        if word == self._content_end and (yield from self._ends_content(word, triggers)):
            return True
        if word in self._edges and not self._has_content:
            yield from cursor.take(word)
            return True
        if self._thinking is not None and word == self._thinking.begin.strip():
            yield from cursor.take(word)
            self.in_thinking = True
            yield from self._reasoning()
            return True
        if calls is not None and word.startswith(calls.trigger):  # noqa: SIM102
            if (yield from self._section(calls, start)):
                return True
        if opened:  # a message without a header, as a form of the answer may force one
            cursor.at = start + len(opened)
            return True
        cursor.at = cursor.text.index(word, start) + len(word)
        self.content(cursor.text[start : cursor.at])
        return False

    def _ends_content(self, word: str, triggers: Triggers) -> Steps[bool]:
        """Passes the marker behind a content where nothing but structure follows it; it may be a
        word of the content itself."""
        cursor, start = self._cursor, self._cursor.at
        yield from cursor.take(word)
        end = cursor.at
        try:
            yield from cursor.space()
            for other in triggers.words:
                if (yield from cursor.take(other)):
                    cursor.at = end
                    return True
        except TextEndError:
            if not cursor.text[end:].strip():
                cursor.at = len(cursor.text)
                raise
        cursor.at = start
        return False

    def _bare(self, calls: Calls) -> Steps[None]:
        """An answer that is a call from its first character on, or content."""
        start = self._cursor.at
        try:
            yield from self._pass_edges()
            is_call = (yield from self._cursor.peek()) == calls.trigger
        except TextEndError:
            self._cursor.at = start
            self._rest()
            raise
        if is_call and (yield from self._section(calls, self._cursor.at)):
            yield from self._pass_edges()
            yield from self._cursor.space()
        self._rest()
        self._passes = True

    def _pass_edges(self) -> Steps[None]:
        """Passes markers before or behind bare calls."""
        found = bool(self._edges)
        while found:
            found = False
            for word in self._edges:
                if (yield from self._cursor.take(word)):
                    found = True

    def _section(self, calls: Calls, start: int) -> Steps[bool]:
        """Reads the calls that begin here; without any the place goes to `start`, and it is
        False."""
        cursor, count = self._cursor, self._num_seen
        reader = CallReader(calls, self._options.tools, cursor, self)
        self._attempt = start
        cursor.held = True
        try:
            if (yield from cursor.take(calls.section_begin)):
                yield from self._several(calls, reader)
        except TextEndError:
            self._end_of_calls(calls, reader)
            raise
        cursor.held = False
        if self._num_seen == count:
            cursor.at = start
            if not calls.known_only:
                self.has_unread_calls = True
        return self._num_seen > count

    def _several(self, calls: Calls, reader: CallReader) -> Steps[None]:
        """Reads calls, up to the end of the section or to other text."""
        cursor = self._cursor
        is_list = bool(calls.section_end or calls.separator.strip())
        while (yield from reader.one()):
            self._attempt = cursor.at
            if calls.section_end and (yield from cursor.take(calls.section_end)):
                return
            if not is_list:
                return
            yield from cursor.take(calls.separator)
            cursor.held = True
        if self._num_seen:
            cursor.at = self._attempt

    def _end_of_calls(self, calls: Calls, reader: CallReader) -> None:
        """Ends the text within calls: what was not a call is content, nothing is lost."""
        cursor = self._cursor
        rest = cursor.text[cursor.at if reader.begun else self._attempt :]
        cursor.at = len(cursor.text)
        if reader.begun:
            self.arguments(rest)
        elif not (self._num_seen and _is_part(rest, calls.section_end, calls.separator)):
            self.content(rest)
            if not cursor.is_cut:
                self.has_unread_calls = True

    def _rest(self) -> None:
        rest = self._cursor.text[self._cursor.at :]
        self._cursor.at = len(self._cursor.text)
        if rest:
            self.content(rest)


def _is_part(text: str, *markers: str) -> bool:
    """True if a text is the beginning of a marker, apart from white space."""
    found = "".join(text.split())
    return any("".join(marker.split()).startswith(found) for marker in markers)


def _is_whole(text: str, marker: str) -> bool:
    """True if a text is a marker, apart from white space."""
    return "".join(text.split()) == "".join(marker.split())


_CHARACTERS = string.ascii_letters + string.digits


def call_id() -> str:
    """An id of a call as OpenAI's look."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters and digits."""
    return "".join(map(partial(secrets.choice), (_CHARACTERS,) * 9))
