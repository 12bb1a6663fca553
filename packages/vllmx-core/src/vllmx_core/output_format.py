"""Descriptions of how models write reasoning, answers and tool calls.

`vllmx_engine.formats` uses a description to parse streamed answers, to make the grammar of a forced
call, and to write calls as the model would.

A marker is given as the model writes it. Readers accept more or less white space in it, except
inside of `TaggedArguments`, where it may belong to a value.
"""

from __future__ import annotations

import re
from typing import Literal

from vllmx_core.records import Record

_PLACEHOLDER = re.compile(r"\{(?:name|id|index)\}")


class Thinking(Record):
    """The markers around thoughts. A prompt that ends with `begin` leaves them open: the answer
    starts inside of them."""

    begin: str
    end: str


class JsonCall(Record):
    """A call that is one JSON object; the values are its keys."""

    name: str | None = "name"
    """None: the name is itself the key, and its value the arguments."""
    arguments: str = "arguments"
    id: str | None = None
    wrapper: str | None = None
    """Key of the object that holds the others, as "function" does in OpenAI's requests."""
    spelling: str = '{"name": "{name}", "arguments": {arguments}}'
    """The object as it is written, with {name}, {arguments} and perhaps {id} and {index}."""


class JsonArguments(Record):
    """Arguments as one JSON object; `as_string`: as a JSON string that holds it."""

    as_string: bool = False


class TaggedArguments(Record):
    """Each argument between markers of its own: strings as they are, other values as JSON."""

    key_begin: str
    key_end: str
    """Stands between a key and its value; {type} in it is the value's type in JSON Schema."""
    value_end: str
    string_key_end: str | None = None
    """`key_end` before a string, where the format tells strings; else the tool's schema does."""
    quotes: tuple[str, str] | None = None
    """Optional quotes around a string that contains characters of markers, such as XML's CDATA."""


class ValueArguments(Record):
    """Arguments in a notation of values that is not JSON: Python's keywords, or Gemma's."""

    begin: str
    key_end: str
    separator: str
    end: str
    quote: str = '"'
    """Stands around strings."""
    escapes: bool = True
    """Backslashes in strings are escapes."""
    python: bool = True
    """True, False and None in place of true, false and null; keys within values are strings."""


class NamedCall(Record):
    """A call whose name precedes its arguments."""

    arguments: JsonArguments | TaggedArguments | ValueArguments
    header: str = "{name}"
    """The text that identifies the call, with {name} once or more, and perhaps {id} and {index}."""
    header_end: str = ""
    """The text between header and arguments."""


class Calls(Record):
    """The calls of an answer: `section_begin (begin call end) separator ... section_end`.

    Without a section the calls follow each other. Where neither a section nor a call has a marker
    before it (`is_bare`), an answer that begins as one is a call if it names a tool of the request.
    """

    call: JsonCall | NamedCall
    begin: str = ""
    end: str = ""
    section_begin: str = ""
    section_end: str = ""
    separator: str = ""
    after_content: str = ""
    """Stands between a content and the calls."""
    is_bare: bool = False
    known_only: bool = False
    """Calls of tools that the request does not define are content, as bare calls always are."""
    end_thoughts: bool = False
    """The marker that begins calls ends thoughts, too, which such models often leave open."""
    is_compact: bool = False
    """JSON is written without blanks."""
    ids: Literal["call", "short"] = "call"
    """Ids where the model writes none: "call_" and 24 digits, or nine letters and digits, which is
    all that Mistral's templates take."""

    @property
    def trigger(self) -> str:
        """The text that begins calls: the first marker up to its first white space or JSON bracket,
        before which models may or may not write white space."""
        words = (self.section_begin or self.begin).split()
        if not words:
            return "{"
        return words[0][:-1] if words[0].endswith((">[", "][")) else words[0]


class Channels(Record):
    """An answer made of messages, each with a header that names its channel and recipient, as the
    Harmony format of gpt-oss: `start role channel NAME to=functions.TOOL message TEXT end`."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    thinking: str = "analysis"
    content: str = "final"
    calls: str = "commentary"
    recipient: str = " to=functions."


class OutputFormat(Record):
    """The parts of an answer; None: the model has no such part.

    Formats of third parties are found by the hook `vllmx_parsers` (`ParserSpec`).
    """

    name: str
    thinking: Thinking | None = None
    calls: Calls | None = None
    channels: Channels | None = None
    """Channels, which replace the two others."""
    content_begin: str = ""
    """Marks the beginning of the content, which does not include it."""
    content_end: str = ""
    always_content: bool = False
    """Every answer has content, even if empty; the prompt may already have its marker."""
    opened: str = ""
    """The text that begins every message, where the prompt already ends with it, so that the first
    message of an answer lacks it. Thoughts may then come between messages."""
    skipped: tuple[str, ...] = ()
    """Texts before or after contents and calls that belong to neither."""

    @property
    def thinking_begin(self) -> str:
        """The text by which the model itself begins its first thoughts."""
        return "" if self.thinking is None else self.thinking.begin.removeprefix(self.opened)

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may be special tokens, and so must not be left out of the text."""
        found: list[str] = [self.content_begin, self.content_end, self.opened, *self.skipped]
        if self.thinking is not None:
            found += [self.thinking.begin, self.thinking.end]
        if self.calls is not None:
            calls = self.calls
            found += [calls.section_begin, calls.begin, calls.end, calls.section_end]
            found += _call_markers(calls.call)
        if self.channels is not None:
            each = self.channels
            found += [each.start, each.channel, each.constrain, each.message, *each.ends]
        return tuple(marker for marker in found if marker.strip())


def _call_markers(call: JsonCall | NamedCall) -> list[str]:
    if isinstance(call, JsonCall):
        return []
    found = [*_PLACEHOLDER.split(call.header), call.header_end]
    match call.arguments:
        case TaggedArguments(key_begin, key_end, value_end):
            found += [key_begin, *key_end.split("{type}"), value_end]
        case ValueArguments(begin, quote=quote):
            found += [begin, quote]
        case _:
            pass
    return found
