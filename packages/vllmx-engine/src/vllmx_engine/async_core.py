"""AsyncCore: the state and the life of an engine core, as asyncio programs see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, cast

from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, InvalidRequestError, VllmxError

from vllmx_engine.client.async_text import AsyncText
from vllmx_engine.client.chat import ChatRenderer
from vllmx_engine.client.chat_images import chat_images
from vllmx_engine.client.pooling import PoolingBuilder
from vllmx_engine.client.request import Request, RequestBuilder
from vllmx_engine.grammar.vocabulary import vocabulary_of
from vllmx_engine.link.frontend import IN_FLIGHT, Frontend, Listener, Sleeper
from vllmx_engine.link.grammar_process import GrammarChecker
from vllmx_engine.streams import Streams
from vllmx_engine.text.gauge import Gauge
from vllmx_engine.wire.messages import AdapterInfo, CoreInfo, CoreStats

if TYPE_CHECKING:
    from vllmx_engine.replicas.frontend import ReplicaFrontend
    from vllmx_engine.replicas.seats import ReplicaState

logger = logging.getLogger("vllmx.core")

PauseMode = Literal["abort", "wait", "keep"]
_PAUSE_POLL_S = 0.02
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
        note = getattr(self._frontend, "note", None)
        if note is not None:
            note(cause)

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
        return await self._frontend.call("reset_prefix_cache")

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops the core until `resume`: running requests end now (`abort`), end as they would
        (`wait`: returns then, or when it is resumed) or stop where they are (`keep`). Later ones
        wait."""
        is_settled = await self._frontend.call("pause", mode)
        while not is_settled:
            await asyncio.sleep(_PAUSE_POLL_S)
            is_settled = await self._frontend.call("is_settled")

    async def is_paused(self) -> bool:
        """True from `pause` to `resume`."""
        return await self._frontend.call("is_paused")

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._frontend.call("resume")

    async def update_weights(self, path: str) -> None:
        """Loads other weights of the same model in place, and forgets cached prefixes. A core that
        starts again, after `sleep` or a crash, has the old ones. Raises InvalidRequestError while
        requests run, and what loading raises; then the old weights stay."""
        await self._frontend.call("update_weights", path)

    async def end_session(self, client: str, session_id: str) -> bool:
        """Unpins the blocks of a client's session; False: it has none of this id."""
        return await self._frontend.call("end_session", session_id, client)

    @property
    def adapters(self) -> list[AdapterInfo] | None:
        """The LoRA adapters that requests may name; None: the model takes none."""
        return self.info.adapters if self.stats.adapters is None else self.stats.adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Reads a LoRA adapter on the core's machine and gives it a name; later requests of that
        name use it in place of another. Raises AdapterError, ModelNotFoundError, WeightFormatError,
        ConfigError where the model takes none, and EngineDeadError."""
        await self._frontend.change_adapters(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests in flight keep it. Raises as `load_adapter`."""
        await self._frontend.change_adapters(name, None)

    async def sleep(self, level: int = 2, *, force: bool = False) -> None:
        """Ends the core, and frees what it holds, until `wake`. Level 1 keeps the files of weights
        in the host's memory. Raises InvalidRequestError while requests are in flight (with `force`
        these are lost), and where another process started the core."""
        if self.num_in_flight and not force:
            raise InvalidRequestError(IN_FLIGHT)
        await self._own_core().sleep(level)

    async def wake(self) -> None:
        """Starts the core again. Raises what it met then."""
        await self._own_core().wake()

    @property
    def replicas(self) -> list[ReplicaState]:
        """The replicas of the core; empty: there are none."""
        return self._with_replicas().replicas() if self._has_replicas else []

    async def drain_replica(self, number: int, timeout_s: float) -> None:
        """Sends a replica nothing more, waits for its requests, moves those that take longer than
        `timeout_s`, and ends it. Raises InvalidRequestError for the last one that serves."""
        await self._with_replicas().drain(number, timeout_s)

    async def add_replica(self, number: int) -> None:
        """Starts a drained replica again. Raises what its core meets."""
        await self._with_replicas().bring_back(number)

    @property
    def _has_replicas(self) -> bool:
        return self.config.replicas > 1 or self.config.replica_hosts is not None

    def _with_replicas(self) -> ReplicaFrontend:
        if not self._has_replicas:
            raise InvalidRequestError("the model has no replicas: start with --replicas")
        return cast("ReplicaFrontend", self._frontend)

    def _own_core(self) -> Sleeper:
        if not hasattr(self._frontend, "sleep"):
            raise InvalidRequestError("this core cannot sleep: it has no process of its own here")
        return cast("Sleeper", self._frontend)

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
        self._streams.check_open(num_choices, client)

    def _take_stats(self, stats: CoreStats) -> None:
        self.stats = stats

    def _take_loss(self, error: VllmxError) -> None:
        self.stats = CoreStats()
        self._streams.lose(error)

    def _take_restart(self, info: CoreInfo) -> None:
        self._builder.info = self._pooling.info = info
        self._streams.begin_anew()
