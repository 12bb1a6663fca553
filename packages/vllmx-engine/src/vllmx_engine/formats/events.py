"""Events of a parsed answer in text order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vllmx_engine.wire.outputs import ToolCall


class ReasoningPiece(msgspec.Struct, frozen=True, gc=False):
    """Thoughts that follow."""

    text: str


class ContentPiece(msgspec.Struct, frozen=True, gc=False):
    """Content that follows."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool begins; its arguments follow."""

    index: int
    id: str
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call is complete."""

    index: int


Event = ReasoningPiece | ContentPiece | CallBegin | ArgumentsPiece | CallEnd


class AnswerEvents:
    """Gathers the events of one answer from what reads its parts.

    Args:
        make_id: makes the id of a call that has none.
        one_call: calls after the first are left out.
    """

    def __init__(self, make_id: Callable[[], str], *, one_call: bool = False) -> None:
        self._make_id = make_id
        self._one_call = one_call
        self._events: list[Event] = []
        self.num_calls = 0
        """Calls that have begun, those that were left out aside."""
        self._num_seen = 0
        self._ends_within_call = False
        """The last of them has not ended."""
        self.has_unread_calls = False
        """Something began as calls do and was none that can be read."""
        self.in_thinking = False
        """The text that comes next is thought."""
        self.has_reasoned = False
        """True once there was reasoning, even if empty."""
        self._has_content = False
        """Content has begun that nothing has ended yet."""

    def content(self, text: str) -> None:
        self._has_content = True
        self._events.append(ContentPiece(text))

    def begin_reasoning(self) -> None:
        self.has_reasoned = self.in_thinking = True

    def reasoning(self, text: str) -> None:
        """Thoughts that follow."""
        self._events.append(ReasoningPiece(text))

    def end_reasoning(self) -> None:
        """Thoughts are complete."""
        self.in_thinking = False

    def begin(self, name: str, call_id: str | None) -> None:
        """The name of a call is known; nothing of the call is content any more."""
        self._num_seen += 1
        if not self._is_left_out:
            self._events.append(CallBegin(self.num_calls, call_id or self._make_id(), name))
            self.num_calls += 1
            self._ends_within_call = True

    def arguments(self, text: str) -> None:
        """JSON text of the arguments that follows."""
        if text and not self._is_left_out:
            self._events.append(ArgumentsPiece(self.num_calls - 1, text))

    def end(self) -> None:
        """The call is complete."""
        if not self._is_left_out:
            self._events.append(CallEnd(self.num_calls - 1))
            self._ends_within_call = False

    @property
    def _is_left_out(self) -> bool:
        return self._one_call and self._num_seen > 1

    def taken(self) -> list[Event]:
        """Takes the events since the last call."""
        events = self._events
        if not events:
            return []
        self._events = []
        return events if len(events) == 1 else _joined(events)


def _joined(events: list[Event]) -> list[Event]:
    """The same, with the pieces of one text made one."""
    found: list[Event] = []
    parts: list[str] = []
    for event, following in zip(events, [*events[1:], None], strict=True):
        if not isinstance(event, (ArgumentsPiece, ContentPiece, ReasoningPiece)):
            found.append(event)
            continue
        parts.append(event.text)
        if type(event) is not type(following):
            found.append(msgspec.structs.replace(event, text="".join(parts)))
            parts = []
    return found


class ReadAnswer:
    """The parts of an answer, gathered from events."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._arguments: list[list[str]] = []
        self._calls: list[tuple[str, str]] = []

    def add(self, events: Sequence[Event]) -> None:
        """Takes in what follows of the text."""
        for event in events:
            match event:
                case ContentPiece(text):
                    self._content.append(text)
                case ReasoningPiece(text):
                    self._reasoning.append(text)
                case CallBegin(_, call_id, name):
                    self._calls.append((call_id, name))
                    self._arguments.append([])
                case ArgumentsPiece(_, text):
                    self._arguments[-1].append(text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(call_id, name, "".join(parts))
            for (call_id, name), parts in zip(self._calls, self._arguments, strict=True)
        ]
