"""The outputs of one request as an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

from vllmx_core.errors import VllmxError

from vllmx_engine.client.request import Request
from vllmx_engine.client.request_state import RequestState
from vllmx_engine.wire.messages import CoreOutput
from vllmx_engine.wire.outputs import RequestOutput


class Sink(Protocol):
    """Takes tokens of a stream in place of its consumer, on the event loop's thread."""

    def is_ready(self) -> bool:
        """It takes what has come; False: the consumer is woken."""
        ...

    def take(self, text: str, ids: list[int], now_s: float) -> None:
        """Text and tokens that are new, and when they came, in seconds of `time.monotonic`."""
        ...


class RequestStream:
    """Outputs of one request as they come: an async iterator and an async context manager.

    Raises the request's error (`EngineDeadError` when the core died) from the iteration; an abort
    ends it with a last output of finish reason "abort". Cancelling the task that waits aborts, and
    so does leaving the `async with` early. Updates that the consumer has not taken yet are merged
    into one output, so that a slow consumer costs no memory and delays no one else.

    Args:
        request: what was asked.
        on_end: called once when the request has ended.
        on_abort: ends the request from this side, with an error where there is one.
    """

    __slots__ = (
        "_ended",
        "_has_rest",
        "_has_update",
        "_on_abort",
        "_on_end",
        "_sink",
        "_state",
        "_waiter",
        "request",
    )

    def __init__(
        self,
        request: Request,
        on_end: Callable[[RequestStream], None],
        on_abort: Callable[[RequestState, VllmxError | None], None],
    ) -> None:
        self.request = request
        self._on_end = on_end
        self._on_abort = on_abort
        self._state: RequestState
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_update = False
        self._has_rest = False
        self._ended = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_ids

    def attach(self, state: RequestState) -> None:
        """Names the state whose updates these are; called once, before any update."""
        self._state = state

    def divert(self, sink: Sink) -> None:
        """Sends new text straight to `sink` while the consumer waits, so that a token wakes no
        task; the end still goes to the consumer. This is for streams of deltas with one choice and
        without log-probabilities. Without stop strings the text is not even gathered."""
        self._sink = sink
        choice = self._state.choices[0]
        if choice.text.is_plain:
            choice.shortcut = self._pass_on

    def _pass_on(self, output: CoreOutput, now_s: float) -> bool:
        """Hands an update in the middle of the answer to the sink. False: it must be gathered,
        since nobody takes it now, others wait before it, or it is the end."""
        state, waiter, sink = self._state, self._waiter, self._sink
        if waiter is None or waiter.done() or output.finish_reason is not None:
            return False
        choice = state.choices[0]
        assert sink is not None
        if choice.has_update or not sink.is_ready():
            return False
        ids = output.ids
        text = choice.text.push_plain(ids)
        state.tokens_came(len(ids), now_s)
        sink.take(text, ids, now_s)
        return True

    def wake(self) -> None:
        """An update is ready."""
        self._has_update = True
        state, waiter, sink = self._state, self._waiter, self._sink
        finished = state.num_unfinished == 0
        if finished:
            self._on_end(self)
        if waiter is None or waiter.done():
            return
        if sink is None or finished or not sink.is_ready():
            waiter.set_result(None)
            return
        self._has_update = False
        text, ids = state.choices[0].give()
        sink.take(text, ids, state.metrics.last_token_s or 0.0)

    def abort(self) -> None:
        """Ends the request now; the core frees its blocks before its next step."""
        if not self._state.finished:
            self._on_abort(self._state, None)

    def fail(self, error: VllmxError) -> None:
        """Ends the request now, as `abort` does; the iterating consumer gets this error."""
        if not self._state.finished:
            self._on_abort(self._state, error)

    async def last(self) -> RequestOutput:
        """Waits for the end and returns the last output: with kind "final" the whole answer."""
        output = await anext(self)
        async for following in self:
            output = following
        return output

    async def aclose(self) -> None:
        """Aborts the request unless it has ended; the iteration ends."""
        self._ended = True
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._has_update:
            await self._wait()
        elif self._has_rest:
            await asyncio.sleep(0)  # a large output goes out in pieces, between which others run
        self._has_update = False
        if self._state.finished and self._state.error is not None:
            self._ended = True
            raise self._state.error
        output = self._state.output()
        self._ended = output.finished
        self._has_rest = self._has_update = not output.finished and self._state.has_rest
        return output

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
