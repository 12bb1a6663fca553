"""One answer of a model to a conversation: of an engine in this process, or of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from vllmx_core.config import EngineConfig
from vllmx_core.errors import VllmxError

if TYPE_CHECKING:
    from vllmx_engine.engine import Engine, TextStream
    from vllmx_engine.formats.events import ReadAnswer
    from vllmx_engine.wire.outputs import ToolCall

Messages = Sequence[dict[str, Any]]


class Aside(str):
    """A piece that is not part of the answer: a call or its result."""

    __slots__ = ()


class Thought(Aside):
    """A piece of the model's thoughts."""

    __slots__ = ()


class Round(Protocol):
    """One answer.

    Attributes:
        found: the parts of the answer so far.
    """

    found: ReadAnswer

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...

    @property
    def is_cut(self) -> bool:
        """True if the answer ended because of its length."""
        ...

    def pieces(self) -> Iterator[str]:
        """Yields text as it arrives; thoughts are asides. Raises VllmxError."""
        ...

    def calls(self) -> list[ToolCall]:
        """Calls of tools, if the answer is complete."""
        ...

    def close(self) -> None:
        """Ends the answer. May be called twice."""
        ...


class ChatModel(Protocol):
    """A model that answers conversations."""

    title: str

    def begin(self, messages: Messages, sampling: dict[str, Any], functions: Messages) -> Round:
        """Begins an answer. Raises InvalidRequestError."""
        ...

    def check(self, sampling: dict[str, Any]) -> None:
        """Raises InvalidRequestError for bad values, and TypeError for unknown names."""
        ...

    def speculate(self, drafter: str) -> str:
        """Changes the drafter, or describes it if `drafter` is empty. Raises VllmxError."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """A model in this process.

    Args:
        template_arguments: variables of the chat template.
    """

    def __init__(self, config: EngineConfig, template_arguments: dict[str, Any]) -> None:
        self._config = config
        self._template_arguments = template_arguments
        self._engine = self._loaded()

    def _loaded(self) -> Engine:
        from vllmx_engine.engine import Engine

        engine = Engine(self._config)
        info = engine.info
        self.title = (
            f"{self._config.name} ({info.architecture}) on {info.backend}, context"
            f" {info.max_model_len}."
        )
        return engine

    def begin(self, messages: Messages, sampling: dict[str, Any], functions: Messages) -> Round:
        from vllmx_engine.client.chat import ChatOptions

        options = ChatOptions(tools=functions or None, template_kwargs=self._template_arguments)
        params = self._engine.sampling_params(**sampling)
        seq_id, _, stream = self._engine.chat_stream(messages, params, options)
        return LocalRound(self._engine, seq_id, stream)

    def check(self, sampling: dict[str, Any]) -> None:
        self._engine.sampling_params(**sampling)

    def speculate(self, drafter: str) -> str:
        if drafter:
            before = self._config
            self._config = replace(before, speculate=drafter)
            self._engine.close()
            try:
                self._engine = self._loaded()
            except VllmxError:
                self._config = before
                self._engine = self._loaded()
                raise
        return f"drafts by: {self._config.speculate}; /speculate ngram, suffix, twin, auto, off ..."

    def close(self) -> None:
        self._engine.close()


class LocalRound:
    """One answer of an engine; see `Round`."""

    def __init__(self, engine: Engine, seq_id: int, stream: TextStream) -> None:
        from vllmx_engine.formats.events import ReadAnswer

        self._engine, self._seq_id, self._stream = engine, seq_id, stream
        self.found: ReadAnswer = ReadAnswer()

    @property
    def num_tokens(self) -> int:
        return len(self._stream.token_ids)

    @property
    def is_cut(self) -> bool:
        return self._stream.finish_reason == "length"

    def pieces(self) -> Iterator[str]:
        from vllmx_engine.formats.events import ContentPiece

        readers = self._stream.readers
        reader = None if readers is None else readers.reader()
        for piece in self._stream:
            yield from shown(self.found, reader.push(piece) if reader else [ContentPiece(piece)])
        if reader is not None:
            is_cut = self._stream.finish_reason != "stop"
            yield from shown(self.found, reader.finish(is_cut=is_cut))

    def calls(self) -> list[ToolCall]:
        return self.found.tool_calls if self._stream.finish_reason == "stop" else []

    def close(self) -> None:
        self._engine.cancel(self._seq_id)


def shown(found: ReadAnswer, events: Sequence[Any]) -> Iterator[str]:
    """Adds events to an answer and yields the texts among them."""
    from vllmx_engine.formats.events import ContentPiece, ReasoningPiece

    found.add(events)
    for event in events:
        if isinstance(event, ContentPiece):
            yield event.text
        elif isinstance(event, ReasoningPiece):
            yield Thought(event.text)
