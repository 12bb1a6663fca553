"""AsyncCore: the state and the life of an engine core, as asyncio programs see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Self

from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, InvalidRequestError, VllmxError

from vllmx_engine.client.async_text import AsyncText
from vllmx_engine.client.chat import ChatRenderer
from vllmx_engine.client.chat_images import chat_images
from vllmx_engine.client.pooling import PoolingBuilder
from vllmx_engine.client.request import Request, RequestBuilder
from vllmx_engine.grammar.vocabulary import vocabulary_of
from vllmx_engine.link.attached_frontend import AttachedFrontend
from vllmx_engine.link.frontend import Frontend, Listener
from vllmx_engine.link.grammar_process import GrammarChecker
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.streams import Streams
from vllmx_engine.text.gauge import Gauge
from vllmx_engine.wire.messages import CoreInfo, CoreStats

logger = logging.getLogger("vllmx.core")

PREPARE_S = 1.0
"""Seconds after the start before grammars are prepared: requests that wait already go first."""


class AsyncCore(AsyncText):
    """An engine core and the streams over it: all that `AsyncLLM` is besides taking requests.

    Attributes:
        config: what it was started with.
        stats: the core's counters, at most a second old while it is busy.
    """

    def __init__(
        self, config: EngineConfig, frontend: Frontend, chat: ChatRenderer, builder: RequestBuilder
    ) -> None:
        super().__init__(builder.tokenizer, chat, chat_images(config, builder))
        self.config = config
        self.stats = CoreStats()
        self._frontend = frontend
        self._builder = builder
        self._pooling = PoolingBuilder(builder.tokenizer, builder.info)
        self._dead = asyncio.Event()
        self.grammars = GrammarChecker(
            partial(vocabulary_of, builder.tokenizer, builder.info.vocab_size, builder.eos_ids)
        )
        self._preparing: asyncio.Task[None] | None = None
        self._streams = Streams(frontend, builder.tokenizer, self.grammars, config.max_queue)
        frontend.listener = Listener(
            self._streams.take,
            self._take_stats,
            self._take_loss,
            self._take_restart,
            self._dead.set,
        )

    # --- state ------------------------------------------------------------------------------------
    @property
    def info(self) -> CoreInfo:
        """The loaded core: context length, vocabulary, backend, memory."""
        return self._frontend.info

    @property
    def is_ready(self) -> bool:
        """Requests are accepted: the core runs and answers, and nobody drains."""
        return self._frontend.status == "ready" and not (self.is_silent or self._streams.draining)

    @property
    def errored(self) -> bool:
        """The core is gone for good: only a new start helps."""
        return self._frontend.status == "dead"

    @property
    def is_asleep(self) -> bool:
        """The core was ended by `sleep`, until `wake`."""
        return self._frontend.status == "asleep"

    @property
    def is_silent(self) -> bool:
        """The core's process is there but does not answer."""
        return self._frontend.silent_s > 0

    @property
    def trouble(self) -> str | None:
        """Why no request is taken, or served, for operators; None while the core runs."""
        if self._frontend.status == "ready":
            silent_s = self._frontend.silent_s
            if not silent_s:
                return None
            return f"the engine core's process has not answered for {silent_s:.1f} s"
        return self._frontend.unavailable().message

    async def until_dead(self) -> EngineDeadError:
        """Returns when the core is gone for good, with the reason."""
        await self._dead.wait()
        return self._frontend.unavailable()

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def abort(self, request_id: str) -> bool:
        """Ends the request of this id with finish reason "abort"; False when there is none."""
        return self._streams.abort(request_id)

    def note(self, cause: VllmxError) -> None:
        """Takes what ended the core from the process that started it."""
        if isinstance(self._frontend, AttachedFrontend):
            self._frontend.note(cause)

    def share(self, sequences: Gauge, texts: Gauge) -> None:
        """Counts the limits in common with other processes over the same core: `max_queue`, and
        bytes of text that wait for threads."""
        self._streams.gauge, self.text.gauge = sequences, texts

    def divide(self, has_several: Callable[[], bool]) -> None:
        """No client fills the queue alone while `has_several` says that there are others."""
        self._streams.has_several = has_several

    def tell_requests(self, on_launch: Callable[[Request], None]) -> None:
        """Tells of each request that the core is given from now on."""
        self._streams.on_launch = on_launch

    # --- life -------------------------------------------------------------------------------------
    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False when running requests hold blocks."""
        return await self._frontend.reset_prefix_cache()

    async def sleep(self) -> None:
        """Ends the core, and frees what it holds, until `wake`. Raises InvalidRequestError while
        requests are in flight, and where another process started the core."""
        if self.num_in_flight:
            raise InvalidRequestError("requests are in flight: have the model sleep when they end")
        await self._own_core().sleep()

    async def wake(self) -> None:
        """Starts the core again. Raises what it met then."""
        await self._own_core().wake()

    def _own_core(self) -> ProcessFrontend:
        if not isinstance(self._frontend, ProcessFrontend):
            raise InvalidRequestError("this core cannot sleep: it has no process of its own here")
        return self._frontend

    async def prepare_grammars(self) -> None:
        """Starts the process that checks grammars, and makes the core build its trie of tokens
        while nobody waits for an answer: it takes half a second for 150,000 tokens, in which no
        step begins. Else the first grammar does both."""
        if await self.grammars.prepare():
            await self._streams.idle.wait()
            if self._frontend.status == "ready":
                self._streams.tell_vocabulary()

    def prepare_grammars_later(self) -> None:
        """Runs `prepare_grammars` in the background after `PREPARE_S`, once, for a model that
        generates."""
        if self._preparing is None and self.info.pooling is None:
            self._preparing = asyncio.ensure_future(self._prepare_after())

    async def _prepare_after(self) -> None:
        await asyncio.sleep(PREPARE_S)
        try:
            await self.prepare_grammars()
        except Exception:  # the first grammar reports it
            logger.exception("grammars cannot be prepared")

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Accepts nothing new and waits for what is in flight; False when the time was up."""
        self._streams.draining = True
        try:
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Aborts what is in flight, ends the core and frees everything. May be called twice."""
        self._streams.draining = True
        self._streams.abort_all()
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait([self._preparing])
        await self.grammars.close()
        await self._frontend.close()
        self.close_text()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    # --- inside -----------------------------------------------------------------------------------
    def check_open(self, num_choices: int = 1, client: str | None = None) -> None:
        """See `vllmx_engine.streams.Streams.check_open`."""
        self._streams.check_open(num_choices, client)

    def _take_stats(self, stats: CoreStats) -> None:
        self.stats = stats

    def _take_loss(self, error: VllmxError) -> None:
        self.stats = CoreStats()
        self._streams.lose(error)

    def _take_restart(self, info: CoreInfo) -> None:
        self._builder.info = self._pooling.info = info
        self._streams.begin_anew()
