"""The interface of those that take the parts of an answer while it is parsed."""

from __future__ import annotations

from typing import Protocol


class CallSink(Protocol):
    """Told of calls."""

    def begin(self, name: str, call_id: str | None) -> None:
        """The name is known; nothing of the call is content any more."""
        ...

    def arguments(self, text: str) -> None:
        """JSON text of the arguments that follows."""
        ...

    def end(self) -> None:
        """The call is complete."""
        ...


class AnswerSink(CallSink, Protocol):
    """Told of everything."""

    def content(self, text: str) -> None:
        """Content that follows."""
        ...

    def unread_call(self) -> None:
        """Something began as a call and was none that can be read."""
        ...

    def begin_reasoning(self) -> None:
        """Thoughts begin."""
        ...

    def reasoning(self, text: str) -> None:
        """Thoughts that follow."""
        ...

    def end_reasoning(self) -> None:
        """Thoughts are complete."""
        ...
