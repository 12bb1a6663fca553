"""Answers made of messages with headers, as gpt-oss writes them, read while they come."""

from __future__ import annotations

import re

from vllmx_core.output_format import Channels

from vllmx_engine.formats.call_steps import passed_on
from vllmx_engine.formats.cursor import Cursor, Steps, TextEndError, Triggers
from vllmx_engine.formats.events import AnswerEvents
from vllmx_engine.formats.tool_schemas import Tools

_MAX_HEADER = 512


class ChannelReader:
    """Reads the messages of one answer, whose prompt has the first message's start already.

    Args:
        tools: of the request; a message to anybody else is content.
    """

    def __init__(
        self, channels: Channels, tools: Tools, cursor: Cursor, events: AnswerEvents
    ) -> None:
        self._channels = channels
        self._tools = tools
        self._cursor = cursor
        self._events = events
        self._ends = Triggers((*channels.ends, channels.start), with_space=False)
        recipient = re.escape(channels.recipient.strip())
        self._recipient = re.compile(recipient + r"([^\s<]{1,256})")
        word, sign, _ = channels.recipient.strip().partition("=")
        self._address = re.compile(r"(?:^|\W)" + re.escape(word + sign))
        self._channel = re.compile(re.escape(channels.channel) + r"\s*(\w+)")

    def read(self) -> Steps[None]:
        """Reads one message after the other, to the end."""
        while True:
            start = self._cursor.at
            header = yield from self._header()
            if header is None:
                self._note_unread(self._cursor.text[start : start + _MAX_HEADER])
                yield from passed_on(self._cursor, self._ends, self._events.content)
            else:
                yield from self._message(header)
            yield from self._end()

    def _header(self) -> Steps[str | None]:
        """Returns the text before a message's content; None if it has no header."""
        cursor, start = self._cursor, self._cursor.at
        try:
            found = yield from cursor.until((self._channels.message,), _MAX_HEADER)
        except TextEndError:
            if not cursor.is_cut:
                self._note_unread(cursor.text[start:])
            self._events.content(self._without_start(cursor.text[start:]))
            cursor.at = len(cursor.text)
            raise
        if found is None:
            return None
        cursor.at += len(found[1])
        return found[0]

    def _without_start(self, header: str) -> str:
        """The content of a message whose text never came: nothing, where it does begin as one."""
        channels = self._channels
        begins = (channels.start, channels.channel, channels.recipient.strip())
        text = header.strip()
        is_header = any(text.startswith(each) or each.startswith(text) for each in begins)
        return "" if is_header else header

    def _note_unread(self, header: str) -> None:
        """Tells of a header that is addressed to a tool and begins no call."""
        if self._tools and self._begins_message(header) and self._address.search(header):
            self._events.has_unread_calls = True

    def _begins_message(self, text: str) -> bool:
        channels = self._channels
        begins = (channels.start, channels.channel, channels.recipient.strip())
        return text.lstrip().startswith(begins)

    def _message(self, header: str) -> Steps[None]:
        events = self._events
        channel = self._channel.search(header)
        recipient = self._recipient.search(header)
        if recipient is not None and self._tools:
            events.begin(recipient[1], None)
            yield from passed_on(self._cursor, self._ends, events.arguments)
            events.end()
            return
        self._note_unread(header)
        if channel is not None and channel[1] == self._channels.thinking:
            events.begin_reasoning()
            yield from passed_on(self._cursor, self._ends, events.reasoning)
            events.end_reasoning()
        else:
            yield from passed_on(self._cursor, self._ends, events.content)

    def _end(self) -> Steps[None]:
        """Passes the end of a message."""
        for end in self._channels.ends:
            if (yield from self._cursor.take(end)):
                break
        self._cursor.trim()
