"""The requests of an asyncio program that the engine core works on, each with its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllmx_core.errors import EngineDeadError, InvalidRequestError, VllmxError

from vllmx_engine.client.request import Request
from vllmx_engine.client.request_state import OutputKind, RequestState
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.client.request_table import RequestTable
from vllmx_engine.link.frontend import Frontend
from vllmx_engine.link.grammar_process import GrammarChecker
from vllmx_engine.text.gauge import Alone, Gauge
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreOutput, FinishReason


class Streams:
    """Sends checked requests to the core and its updates to the waiting consumers.

    Args:
        max_queue: the most sequences that wait, next to those that run.

    Attributes:
        idle: set while there is none.
        draining: nothing new is taken.
        gauge: of sequences in flight.
        has_several: several clients share the queue; see `RequestTable.check_room`.
        on_launch: called with each request sent to the core; None: no hook.
    """

    def __init__(
        self, frontend: Frontend, tokenizer: Tokenizer, grammars: GrammarChecker, max_queue: int
    ) -> None:
        self._frontend = frontend
        self._grammars = grammars
        self._max_queue = max_queue
        self._table = RequestTable(tokenizer)
        self._streams: dict[str, RequestStream] = {}
        self._core_knows_vocabulary = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.gauge: Gauge = Alone()
        self.has_several: Callable[[], bool] = lambda: False
        self.on_launch: Callable[[Request], None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(self._streams.values())

    @property
    def most_together(self) -> int:
        """The sequences of a call that may be cut into parts, which leave others room."""
        running = self._frontend.info.max_num_seqs
        if self.has_several():
            return max(running, (running + self._max_queue) // 4)
        return running + self._max_queue // 2

    def check_open(self, num_choices: int, client: str | None = None) -> None:
        """Checks that a client's call with so many choices could be accepted now.

        Raises:
            InvalidRequestError: it could never be, because they are more than may run and wait.
            QueueFullError: too many wait already.
            EngineDeadError: the core is being restarted or gone, or the engine drains.
        """
        if self.draining:
            raise EngineDeadError("the engine is shutting down: send the request to another one")
        self._check_room(num_choices, client)

    def _check_room(self, num_choices: int, client: str | None) -> None:
        if self._frontend.status != "ready":
            raise self._frontend.unavailable()
        self._table.check_room(
            num_choices,
            self._frontend.info.max_num_seqs,
            self._max_queue,
            self.gauge.elsewhere,
            client if self.has_several() else None,
        )

    def launch(self, request: Request, kind: OutputKind, *, is_step: bool = False) -> RequestStream:
        """Hands a checked request to the core. Steps of a request in flight go on while the engine
        drains."""
        check = self._check_room if is_step else self.check_open
        check(len(request.core), request.core[0].client)
        self._check_id(request)
        stream = RequestStream(request, self.forget, self._end)
        stream.attach(self._table.add(request, kind, stream.wake))
        self.hold(stream)
        try:
            grammar = request.core[0].grammar
            if grammar is not None and grammar.text:
                self.tell_vocabulary()
            self._frontend.add(request.core)
        except BaseException:
            stream.abort()
            raise
        if self.on_launch is not None:
            self.on_launch(request)
        return stream

    def hold(self, stream: RequestStream) -> None:
        """Counts a stream as in flight until `forget`."""
        self._check_id(stream.request)
        self._streams[stream.request_id] = stream
        self.gauge.set(len(self._table))
        self.idle.clear()

    def _check_id(self, request: Request) -> None:
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in flight already: use another one",
                param="request_id",
            )

    async def launch_all(
        self, requests: Sequence[Request], kind: OutputKind, *, is_step: bool = False
    ) -> list[RequestStream]:
        """All or none of them."""
        streams: list[RequestStream] = []
        with all_or_none(streams):
            for request in requests:
                if streams:
                    await asyncio.sleep(0)
                streams.append(self.launch(request, kind, is_step=is_step))
        return streams

    def abort(self, request_id: str) -> bool:
        """See `AsyncLLM.abort`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    def abort_all(self) -> None:
        """Ends all of them from this side."""
        self._frontend.abort(self._table.end_all("abort"))

    def take(self, outputs: list[CoreOutput]) -> None:
        """Spreads the updates of a step."""
        self._frontend.abort(self._table.take(outputs))

    def lose(self, error: VllmxError) -> None:
        """The core is gone, and all of them with it."""
        self._table.end_all("error", error)

    def begin_anew(self) -> None:
        """The core was started again and knows nothing."""
        self._core_knows_vocabulary = False

    def tell_vocabulary(self) -> None:
        """Sends the vocabulary, needed before the first request with a grammar."""
        if not self._core_knows_vocabulary:
            self._frontend.tell(self._grammars.vocabulary)
            self._core_knows_vocabulary = True

    def _end(self, state: RequestState, error: VllmxError | None) -> None:
        """Ends a request from this side."""
        reason: FinishReason = "abort" if error is None else "error"
        self._frontend.abort(self._table.end(state, reason, error))

    def forget(self, stream: RequestStream) -> None:
        """A request has ended."""
        self._streams.pop(stream.request_id, None)
        self.gauge.set(len(self._table))
        if not self._streams:
            self.idle.set()


@contextmanager
def all_or_none(streams: Sequence[RequestStream]) -> Iterator[None]:
    """Ends all streams when anything is raised inside, or when the caller is cancelled."""
    try:
        yield
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
