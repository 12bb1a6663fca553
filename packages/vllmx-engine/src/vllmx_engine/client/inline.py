"""The engine core in this process: steps run while a thread waits for an answer."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self, TypeVar

from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, RankLostError, StepTimeoutError
from vllmx_core.plugins.registry import Registry
from vllmx_core.records import MutableRecord, field
from vllmx_core.sampling import SamplingParams

from vllmx_engine.audio.slices import finished
from vllmx_engine.client.chat import (
    ChatMessage,
    ChatOptions,
    ChatRenderer,
    Message,
    load_tokenizer,
)
from vllmx_engine.client.chat_images import chat_images
from vllmx_engine.client.pooling import PoolingBuilder
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.client.request_state import OutputKind, RequestState
from vllmx_engine.client.request_table import RequestTable
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import load_core
from vllmx_engine.core.watchdog import StepWatch, log_stuck
from vllmx_engine.grammar.vocabulary import Lexicon, vocabulary_of
from vllmx_engine.wire.grammars import GrammarSpec
from vllmx_engine.wire.outputs import RequestOutput


class _Waiter(MutableRecord):
    done: Callable[[], bool]
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Stepper:
    """Several threads may wait at once; a step serves them all.

    The thread ends soon after the last of them has what it wanted, so that an engine that nobody
    uses is freed like any object.

    Args:
        step: computes one step. All threads that wait get what it raises.
        more: whether another step would compute anything.
    """

    LINGER_S = 0.01
    """The seconds for which the thread goes on without a reader, or waits for work. A reader of a
    stream comes back at once, and the next token is already under way: waking two threads for each
    would cost 0.1 ms a token."""

    def __init__(self, step: Callable[[], None], more: Callable[[], bool]) -> None:
        self._step = step
        self._more = more
        self._left_s = 0.0
        """The time when the last waiting thread had its result."""
        self._change = threading.Condition()
        self._waiters: list[_Waiter] = []
        self._running = False
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """True on the thread that runs the steps."""
        return self._thread is threading.current_thread()

    def wait(
        self, done: Callable[[], bool], look: Callable[[], None], interval_s: float | None
    ) -> None:
        """Steps until `done()`, which is asked before each step and on the thread of the steps.
        Calls `look` here every `interval_s` meanwhile; what it raises ends the wait."""
        waiter = _Waiter(done)
        with self._change:
            self._waiters.append(waiter)
            if self._running:
                self._change.notify()
            else:
                self._running = True
                self._thread = threading.Thread(target=self._run, name="vllmx-steps", daemon=True)
                self._thread.start()
        try:
            while not waiter.over.wait(interval_s):
                look()
        finally:
            with self._change:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _run(self) -> None:
        while self._somebody_waits():
            try:
                self._step()
            except BaseException as error:  # raised again in each waiting thread
                with self._change:
                    waiters, self._waiters = self._waiters, []
                for waiter in waiters:
                    waiter.error = error
                    waiter.over.set()

    def _somebody_waits(self) -> bool:
        """Releases the threads that have their result; False when this one must end."""
        with self._change:
            while True:
                for waiter in [waiter for waiter in self._waiters if waiter.done()]:
                    self._waiters.remove(waiter)
                    waiter.over.set()
                    self._left_s = time.monotonic()
                if self._waiters:
                    return True
                if time.monotonic() - self._left_s < self.LINGER_S and self._more():
                    return True
                woken = self._change.wait(self.LINGER_S)
                if not (woken or self._waiters):  # one may have come as the time was up
                    self._running = False
                    return False


logger = logging.getLogger("vllmx.inline")

MAX_KEPT_GRAMMARS = 64
ON_WAIT_S = 0.1
"""The seconds between two calls of `on_wait`."""

_GIVEN_UP = (StepTimeoutError, RankLostError)
"""Ends of a core that its own thread need not have met."""


T = TypeVar("T")


class InlineEngine:
    """An engine core and its requests. Several threads may use it: steps run on a thread of their
    own while anybody waits (see `Stepper`), and whatever else touches the core takes turns with
    them. A thread that waits, for a step or for its turn, watches for hanging steps.

    Raises (constructor): the typed reason why the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, registry: Registry | None = None) -> None:
        found = find_model(config, registry)
        self.config = config
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            tokenizer = pool.submit(load_tokenizer, found)
            self._core, self.info = load_core(found)
        try:
            self.tokenizer = tokenizer.result()
            self.renderer = ChatRenderer.of(config, self.tokenizer, found.registry)
            self.builder = RequestBuilder(self.tokenizer, self.info, config.seed)
            self.pooling = PoolingBuilder(self.tokenizer, self.info)
            self.builder.check_grammar = self._check_grammar
            self.images = chat_images(config, self.builder)
            self._table = RequestTable(self.tokenizer)
        except BaseException:
            self._core.close()
            raise
        self._stepper = Stepper(self._step, lambda: len(self._table) > 0)
        self._turn = Turn()
        self._verdict = threading.Lock()
        """Held while results are taken in or handed out, and while the core is given up."""
        self._closed: EngineDeadError | None = None
        self._freed = False
        self._lexicon: Lexicon | None = None
        self._verdict_on_grammars = threading.Lock()
        self._grammars: OrderedDict[bytes, str] = OrderedDict()
        """Grammars that can be followed, by digest: the prompts of a call mostly share one."""

    def on_core(self, call: Callable[[EngineCore], T]) -> T:
        """Calls a function with the core between two steps. Raises EngineDeadError."""
        with self._a_turn():
            self._check_open()
            return call(self._core)

    def chat_request(
        self,
        conversation: Sequence[ChatMessage | Message],
        params: SamplingParams | None,
        options: ChatOptions,
        own: RequestOptions | None = None,
    ) -> Request:
        """The request for the answer to a conversation, with its images. Raises
        InvalidRequestError."""
        renderer, builder = self.renderer, self.builder
        builder.check_chats()
        found = renderer.with_calls(params or builder.sampling_params(), options)
        plain, pictures = self.images.take(conversation)
        for index in pictures.far:
            pictures.fetch(index)
        finished(pictures.measure())
        prompt = renderer.render(plain, options)
        thoughts = renderer.thoughts(found, prompt, options)
        free = renderer.free_part(found, prompt, builder.eos_ids, options)
        text = pictures.written(prompt)
        request = builder.build(
            text,
            found,
            options=own or RequestOptions(),
            add_special_tokens=False,
            thoughts=thoughts,
            free=free,
        )
        request = pictures.placed(request, prompt)
        return renderer.with_readers(request, options)

    def submit(self, request: Request, kind: OutputKind = "final") -> RequestState:
        """Queues a request. Raises EngineDeadError."""
        with self._a_turn():
            self._check_open()
            state = self._table.add(request, kind)
            for core_request in request.core:
                self._core.add(core_request)
            return state

    def run(
        self, states: Sequence[RequestState], on_wait: Callable[[], None] | None = None
    ) -> None:
        """Steps until all of `states` have ended, calling `on_wait` a few times a second. When
        interrupted it aborts them and raises KeyboardInterrupt; the engine stays usable."""
        unfinished = iter(states)
        state = next(unfinished, None)

        def done() -> bool:
            nonlocal state
            while state is not None and state.finished:
                state = next(unfinished, None)
            return state is None

        try:
            self._wait(done, on_wait)
        except BaseException:
            for aborted in states:
                self.abort(aborted)
            raise

    def next_output(self, state: RequestState) -> RequestOutput:
        """Steps until `state` has an update, and hands it out. Raises the request's error."""
        if not state.has_update():
            self._wait(state.has_update)
        with self._verdict:  # and not a turn: the next step may be under way
            if state.error is not None:
                raise state.error
            return state.output()

    def abort(self, state: RequestState) -> None:
        """Ends a request with finish reason "abort", unless it has ended."""
        if state.finished:
            return
        with self._a_turn():
            with self._verdict:
                aborted = self._table.end(state, "abort")
            if self._closed is None:
                self._core.abort(aborted)

    def _check_grammar(self, spec: GrammarSpec) -> str:
        """Checks a grammar in this process, on the calling thread. Raises GrammarError."""
        from vllmx_engine.grammar.check import check  # few requests have a grammar

        with self._verdict_on_grammars:
            if self._lexicon is None:
                size = self.info.vocab_size
                vocabulary = vocabulary_of(self.tokenizer, size, self.builder.eos_ids)
                self._lexicon = Lexicon.of(vocabulary)
                self._core.set_vocabulary(vocabulary)
            text = self._grammars.get(spec.digest)
            if text is None:
                text = self._grammars[spec.digest] = check(spec, self._lexicon)
                if len(self._grammars) > MAX_KEPT_GRAMMARS:
                    self._grammars.popitem(last=False)
            return text

    def close(self) -> None:
        """Ends all requests and frees the model, unless that hangs. May be called twice."""
        try:
            with self._a_turn():
                with self._verdict:
                    self._table.end_all("abort")
                if self._closed is None:
                    self._closed = EngineDeadError("the engine is closed: load the model again")
                if not self._freed:
                    self._freed = True
                    self._free()
        except StepTimeoutError:
            logger.warning("the device hangs: it keeps the model until this process ends")
        except RankLostError:
            pass  # the ranks were ended when that was seen

    def drop(self) -> None:
        """Closes an engine that was garbage-collected, on whichever thread that happened."""
        if self._stepper.is_current:  # `close` would wait for the step that runs here
            threading.Thread(target=self.close, name="vllmx-close", daemon=True).start()
        else:
            self.close()

    def _free(self) -> None:
        """Closes the core on a thread of its own: it waits for the device."""
        closing = threading.Thread(target=self._core.close, name="vllmx-close", daemon=True)
        closing.start()
        watch = StepWatch(self._core)
        while closing.is_alive():
            closing.join(watch.interval_s)
            self._check_progress(watch)

    # --- waiting ----------------------------------------------------------------------------------
    def _wait(self, done: Callable[[], bool], on_wait: Callable[[], None] | None = None) -> None:
        watch = StepWatch(self._core)
        interval_s = watch.interval_s
        if on_wait is not None:
            interval_s = min(interval_s or ON_WAIT_S, ON_WAIT_S)

        def look() -> None:
            self._check_progress(watch)
            if on_wait is not None:
                on_wait()

        self._stepper.wait(done, look, interval_s)

    @contextmanager
    def _a_turn(self) -> Iterator[None]:
        """A turn between two steps. Raises one of `_GIVEN_UP` instead when a step does not come
        back."""
        watch = StepWatch(self._core)
        while not self._turn.acquire(watch.interval_s):
            self._check_progress(watch)
        try:
            yield
        finally:
            self._turn.release()

    def _check_progress(self, watch: StepWatch) -> None:
        """Gives the core up when it hangs: every request ends. Raises what it is given up
        for."""
        with self._verdict:
            error = watch.stuck()
            if error is not None and not isinstance(self._closed, _GIVEN_UP):
                log_stuck(error, self._core)
                self._closed = error
                self._table.end_all("error", error)
        if isinstance(self._closed, _GIVEN_UP):
            self._check_open()

    def _step(self) -> None:
        """One step for all requests, on the stepper's thread."""
        with self._turn:
            self._check_open()
            try:
                outputs = self._core.step()
            except Exception as error:
                logger.exception("the engine core failed")
                text = "the engine core failed; see the log, then load the model again"
                with self._verdict:
                    dead = error if isinstance(error, RankLostError) else EngineDeadError(text)
                    self._closed = self._closed or dead
                    self._table.end_all("error", self._closed)
                raise self._closed from error
            with self._verdict:
                if self._closed is None:
                    self._core.abort(self._table.take(outputs))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(self._closed.message)


class Turn:
    """A fair lock: the next waiting thread holds the gate, so a thread that releases and
    acquires in a loop waits behind it. Not reentrant."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()

    def acquire(self, timeout_s: float | None = None) -> bool:
        """False when the time was up; None: it never is."""
        wait_s = -1.0 if timeout_s is None else timeout_s
        if not self._gate.acquire(timeout=wait_s):
            return False
        try:
            return self._lock.acquire(timeout=wait_s)
        finally:
            self._gate.release()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class HasEngine:
    """A context manager that closes its engine, also when it is garbage-collected."""

    def __init__(self, config: EngineConfig, registry: Registry | None = None) -> None:
        self._engine = InlineEngine(config, registry)
        self._dropping = weakref.finalize(self, self._engine.drop)
        self._dropping.atexit = False  # the process frees everything

    def close(self) -> None:
        """Frees the model. May be called twice."""
        self._engine.close()
        self._dropping.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
