"""The engine core in this process, without threads: whoever waits for an answer runs the steps."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError
from vllmx_core.registry import Registry

from vllmx_engine.chat import ChatRenderer, load_tokenizer
from vllmx_engine.load import load_planned, plan_load
from vllmx_engine.outputs import RequestOutput
from vllmx_engine.request import Request, RequestBuilder
from vllmx_engine.request_state import OutputKind, RequestState
from vllmx_engine.request_table import RequestTable

logger = logging.getLogger("vllmx.inline")


class InlineFrontend:
    """An engine core and its requests. Several threads may use it; they take turns step by step.

    Raises (constructor): the typed reason why the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, registry: Registry | None = None) -> None:
        plan = plan_load(config, registry)
        self.config = config
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            tokenizer = pool.submit(load_tokenizer, plan)
            self._core, self.info = load_planned(plan)
        try:
            self.tokenizer = tokenizer.result()
            self.renderer = ChatRenderer.of(config, self.tokenizer)
            self.builder = RequestBuilder(self.tokenizer, self.info, config.seed)
        except BaseException:
            self._core.close()
            raise
        self._table = RequestTable(self.tokenizer)
        self._turn = Turn()
        self._closed: str | None = None

    def submit(self, request: Request, kind: OutputKind = "final") -> RequestState:
        """Queues a request. Raises EngineDeadError."""
        with self._turn:
            self._check_open()
            state = self._table.add(request, kind)
            for core_request in request.core:
                self._core.add(core_request)
            return state

    def run(
        self, states: Sequence[RequestState], on_step: Callable[[], None] | None = None
    ) -> None:
        """Steps until all of `states` have ended, calling `on_step` after each step. When
        interrupted it aborts them and raises KeyboardInterrupt; the engine stays usable."""
        try:
            with interrupts_between_steps() as check_interrupt:
                for state in states:
                    while not self._step_unless(state.is_finished):
                        check_interrupt()
                        if on_step is not None:
                            on_step()
        except BaseException:
            for state in states:
                self.abort(state)
            raise

    def next_output(self, state: RequestState) -> RequestOutput:
        """Steps until there are news of `state`, and hands them out. Raises the request's error."""
        with interrupts_between_steps() as check_interrupt:
            while not self._step_unless(state.has_news):
                check_interrupt()
        with self._turn:
            if state.error is not None:
                raise state.error
            return state.output()

    def abort(self, state: RequestState) -> None:
        """Ends a request with finish reason "abort", unless it has ended."""
        with self._turn:
            aborted = self._table.end(state, "abort")
            if self._closed is None:
                self._core.abort(aborted)

    def close(self) -> None:
        """Ends all requests and frees the model. May be called twice."""
        with self._turn:
            self._table.end_all("abort")
            if self._closed is None:
                self._closed = "the engine is closed: load the model again"
                self._core.close()

    def _step_unless(self, done: Callable[[], bool]) -> bool:
        """One step for all requests, unless another thread's step was enough: then True."""
        with self._turn:
            if done():
                return True
            self._check_open()
            try:
                outputs = self._core.step()
            except Exception as error:
                logger.exception("the engine core failed")
                self._closed = "the engine core failed; see the log, then load the model again"
                self._table.end_all("error", EngineDeadError(self._closed))
                raise EngineDeadError(self._closed) from error
            self._core.abort(self._table.take(outputs))
            return False

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineDeadError(self._closed)


class Turn:
    """A lock that a thread in a loop cannot keep from others: who waits stands in the door, and
    the loop must wait behind it. Not reentrant."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._room = threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._room.acquire()

    def __exit__(self, *error: object) -> None:
        self._room.release()


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function that raises the KeyboardInterrupt that has come meanwhile: a step that is
    interrupted half-way would leave the core's books wrong. Elsewhere than on the main thread, or
    with a handler of somebody else's, nothing changes."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


class HasEngine:
    """A context manager that closes its engine."""

    _engine: InlineFrontend

    def close(self) -> None:
        """Frees the model. May be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
