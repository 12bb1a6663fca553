"""A served model as APIs see it: engine, configuration, limits, metrics, other processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from vllmx_core.config import DEMO_MODEL
from vllmx_core.errors import ModelNotFoundError, shown
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.wire.messages import CoreInfo

from vllmx_server import __version__
from vllmx_server.config import ServerConfig
from vllmx_server.generating.pooling import Pooler
from vllmx_server.http.client import owner_of
from vllmx_server.http.operation import Endpoint
from vllmx_server.http.route import Route
from vllmx_server.limits.admission import Admission, BodyBudget, Sharing
from vllmx_server.limits.admitted import Admitted, Settlements, admitted
from vllmx_server.limits.keys import ApiKeys, Holder
from vllmx_server.limits.priorities import PriorityRange, priority_ranges
from vllmx_server.limits.rate_limiter import RateLimiter, Unlimited
from vllmx_server.limits.usage import KeyUsage, UsageLedger
from vllmx_server.store.database import Storage
from vllmx_server.watch.metrics import MetricCounts, Metrics
from vllmx_server.watch.prompt_log import PromptLog
from vllmx_server.watch.tracing import trace_of

T = TypeVar("T")


class Processes(Protocol):
    """All processes of the server."""

    @property
    def leads(self) -> bool:
        """This process does the work that one does for all."""

    async def relay(self, request: Request, body: bytes) -> Response:
        """The answer of the process that leads."""

    async def metric_counts(self, own: dict[str, MetricCounts]) -> list[dict[str, MetricCounts]]:
        """The counts of all other processes, by model. `own`: those of this one."""

    async def sleep(self, level: int, *, force: bool) -> None:
        """See `AsyncLLM.sleep`."""

    async def wake(self) -> None:
        """See `AsyncLLM.wake`."""

    async def drain_replica(self, number: int, timeout_s: float) -> None:
        """See `AsyncLLM.drain_replica`."""

    async def add_replica(self, number: int) -> None:
        """See `AsyncLLM.add_replica`."""

    def shut_down(self) -> None:
        """Does what SIGTERM does to the server."""


class Models(Protocol):
    """Several models of one server."""

    @property
    def host(self) -> ModelHost: ...

    @property
    def sleeps_idle(self) -> bool:
        """The default model sleeps for want of requests: the next one wakes it."""

    def name_of(self, name: str | None) -> str:
        """A model's own name. None: the default's. Raises ModelNotFoundError."""

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names of a model."""

    def is_open(self, name: str) -> bool:
        """True if requests for a model need not wait."""

    async def served(self, name: str) -> Served:
        """The `Served` of a model. Waits while it loads. Raises what loading met, and
        OverloadedError when that takes too long."""

    async def leave(self, name: str) -> bool:
        """Lets go of a model's core. False while requests need it."""

    async def close(self) -> None:
        """Leaves all cores; what is in flight is aborted."""

    async def loaded(self) -> Sequence[Served]:
        """All models that are loaded, whichever process had them loaded."""

    def metrics(self) -> list[Metrics]:
        """The metrics of all models that were ever open here."""


@dataclass(slots=True)
class Served:
    """A model as it is served: one for each model of a process. `served_of` finds it."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: Metrics
    bodies: BodyBudget
    storage: Storage
    processes: Processes
    keys: ApiKeys
    """The keys of those who may use the server."""
    usage: UsageLedger
    """The usage of each key."""
    sharing: Sharing
    """The limits that are shared with other processes of the server."""
    pooler: Pooler | None = None
    """The pooler of a model that makes vectors or scores; None: it generates text."""
    models: Models | None = None
    """The models where there are several; None: `llm` is the only one."""
    limiter: RateLimiter = field(default_factory=Unlimited)
    """The limits of keys."""
    settlements: Settlements = field(default_factory=Settlements)
    priorities: dict[str, PriorityRange] = field(default_factory=dict)
    """See `priority_ranges`."""
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = field(init=False)
    """`system_fingerprint` of answers: while it stays the same, so do seeded ones."""
    admission: Admission = field(init=False)
    routes: Sequence[Route] = ()
    """The routes of all APIs."""
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    """The endpoints of POST requests, by path."""
    app: ASGIApp | None = None
    """The application of the endpoints, for requests that come by no connection."""
    takes_any_model: bool = False
    """Requests may name any model if there is only one."""
    stores: dict[type[Any], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_priorities()
        self.fingerprint = fingerprint(self.llm.info)
        self.admission = Admission(self.config.max_concurrent_requests, self.sharing.requests)
        self.llm.share(self.sharing.sequences(self.llm.config.name), self.sharing.texts)
        self.llm.divide(lambda: self.keys.has_several)
        if self.config.enable_log_requests:
            self.llm.tell_requests(PromptLog(self.llm.tokenizer, self.config.max_log_len))

    def store(self, kind: type[T]) -> T:
        """The object of this type that an API has put into `stores`."""
        return cast(T, self.stores[kind])

    def read_priorities(self) -> None:
        """Reads the ranges of priorities again, in place: other models share them."""
        ranges = priority_ranges(self.config.priority_range, self.config.api_key)
        self.priorities.clear()
        self.priorities.update(ranges | self.keys.priority_ranges())

    @property
    def sleeps_idle(self) -> bool:
        """The model sleeps for want of requests: the next one wakes it."""
        return self.models is not None and self.models.sleeps_idle

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError for a name that is not served. None means the only model."""
        if self.adapter_of(name):
            return
        if self.models is not None:
            name = self.models.name_of(name)
        if name is not None and name != self.llm.config.name and not self.takes_any_model:
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; served:"
                f" {', '.join([self.llm.config.name, *self.adapter_names])}",
                param="model",
            )

    @property
    def adapter_names(self) -> list[str]:
        """The LoRA adapters that requests may name in place of the model."""
        return [each.name for each in self.llm.adapters or ()]

    def adapter_of(self, name: str | None) -> str:
        """The adapter that `model` of a request names; empty: it names none."""
        return name if name is not None and name in self.adapter_names else ""

    def called(self, name: str | None) -> str:
        """The name of the model in an answer: that of the adapter, if one was named."""
        return self.adapter_of(name) or self.llm.config.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, its own first."""
        own = self.llm.config.name
        return (own,) if self.models is None else (own, *self.models.aliases(own))

    async def infos(self) -> list[ModelInfo]:
        """All models of the server, this one first; ask the default one."""
        others = [] if self.models is None else await self.models.host.cards()
        return [self._info(), *others]

    def _info(self) -> ModelInfo:
        config, info = self.llm.config, self.llm.info
        return ModelInfo(
            name=config.name,
            aliases=self.names[1:],
            root=info.path if config.model == DEMO_MODEL else config.model,
            state="unloaded" if self.llm.is_asleep else "loaded",
            num_bytes=info.weight_bytes + info.kv_cache_bytes,
            max_model_len=info.max_model_len,
            modalities=modalities_of(info),
        )

    def check_admission(self) -> None:
        """Checks that a generation request would be admitted now, before its body is read.
        Raises OverloadedError while draining or over `max_concurrent_requests`, QueueFullError,
        EngineDeadError."""
        self.admission.check()
        self.llm.check_open()

    async def admit(self, request: Request, num_tokens: int) -> Admitted:
        """Counts a request in flight until the returned object is called. `num_tokens`: the most
        that it may use. Raises what `check_admission` raises, and ForbiddenError and RateLimitError
        for what its key may not do."""
        self.check_admission()
        self.admission.enter()
        found = await self.admit_text(request, num_tokens, self.admission.leave)
        trace = trace_of(request)
        if trace is not None:
            trace.model, trace.admitted = self.llm.config.name, found
        return found

    async def admit_text(
        self, request: Request, num_tokens: int, leave: Callable[[], None] = lambda: None
    ) -> Admitted:
        """Does what `admit` does for a request that the engine does not see: only the limits of its
        key are checked."""
        holder = self.holder(request)
        count = partial(self._count, holder.client)
        return await admitted(
            request, holder, self.names, num_tokens, leave, self.limiter, self.settlements, count
        )

    def holder(self, request: Request) -> Holder:
        """The holder of the key of a request."""
        return self.keys.holder(owner_of(request))

    def _count(self, client: str, new: KeyUsage) -> None:
        """Counts what a client has used."""
        self.usage.of(client).add(new)
        self.usage.changed()
        label = self.keys.label(client)
        if label is not None:
            self.metrics.count_key(label, new)


def served_of(request: Request) -> Served:
    """The model that the request is for, where that is known; else the default one."""
    found = request.scope["state"].get("server")
    return cast(Served, found or request.app.state.served)


def fingerprint(info: CoreInfo) -> str:
    """A digest of the version, and of what computes the logits."""
    parts = (info.path, info.backend, info.device, info.dtype, info.kv_cache_dtype, info.details)
    digest = hashlib.sha256(repr((__version__, info.weight_bytes, *parts)).encode())
    return f"vllmx-{__version__}-{digest.hexdigest()[:8]}"


def cache_labels(llm: AsyncLLM) -> dict[str, object]:
    """The labels of a model's cache."""
    info, config = llm.info, llm.config
    return {
        "block_size": info.block_size,
        "num_gpu_blocks": info.num_kv_blocks,
        "num_state_slots": info.num_state_slots,
        "kv_cache_bytes": info.kv_cache_bytes,
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.memory_fraction,
    }


def modalities_of(info: CoreInfo) -> list[Modality]:
    """The kinds of input that a model takes."""
    if info.audio_rows:
        return ["audio"]
    if info.takes_audio:
        return ["text", "audio"]
    if info.takes_videos:
        return ["text", "image", "video"]
    return ["text", "image"] if info.takes_images else ["text"]


Modality = Literal["text", "image", "video", "audio"]
State = Literal["unloaded", "loading", "loaded", "failed"]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model of several, loaded or not."""

    name: str
    aliases: tuple[str, ...]
    root: str
    state: State
    num_bytes: int | None = None
    """The bytes of weights and KV cache, once it was loaded."""
    max_model_len: int | None = None
    modalities: list[Modality] | None = None
    error: str | None = None
    """Why it could not be loaded."""


class ModelHost(Protocol):
    """Loads and unloads models, here or in another process."""

    async def load(self, name: str) -> object:
        """Returns when the model serves. Raises what loading met."""

    async def unload(self, name: str) -> None:
        """Ends a model's core. Raises InvalidRequestError while requests need it."""

    async def cards(self) -> Sequence[ModelInfo]:
        """All models but the default one."""
