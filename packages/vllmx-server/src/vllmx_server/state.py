"""What the routes share: the engine, the configuration, the metrics, and the requests in flight."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ModelNotFoundError, VllmxError, shown
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.wire.messages import CoreInfo

from vllmx_server import __version__
from vllmx_server.address import reload_certificate
from vllmx_server.admission import Admission
from vllmx_server.background import Background
from vllmx_server.batches.runner import BatchRunner
from vllmx_server.body_budget import BodyBudget
from vllmx_server.config import ServerConfig
from vllmx_server.desk import Desk, OpenDesk
from vllmx_server.engine_pooler import EnginePooler
from vllmx_server.keys.admitted import Admitted, Settling, admitted
from vllmx_server.keys.ring import Holder, KeyRing, reload_keys
from vllmx_server.keys.usage import KeyUsage, UsageBook
from vllmx_server.metrics import Metrics
from vllmx_server.pooling import Pooler
from vllmx_server.priorities import PriorityRange, priority_ranges
from vllmx_server.prompt_log import PromptLog
from vllmx_server.responses.background import BackgroundResponses
from vllmx_server.sharing import Sharing
from vllmx_server.signals import CLOSE_S
from vllmx_server.store.storage import Storage
from vllmx_server.tracing import trace_of

if TYPE_CHECKING:
    from ssl import SSLContext

    from vllmx_server.mcp.servers import ToolServers
    from vllmx_server.models.registry import Models
    from vllmx_server.tracing import Tracer
    from vllmx_server.workers.peers import Peers

logger = logging.getLogger("vllmx.server")

BATCH_PRIORITY = (1 << 31) - 1
"""The priority of batches, which come behind everybody else."""


@dataclass(slots=True)
class ServerState:
    """One per server, at `request.app.state.server`."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: Metrics
    bodies: BodyBudget
    storage: Storage
    document: bytes | None = None
    """`/openapi.json`, once somebody has asked for it."""
    tool_servers: ToolServers | None = None
    """MCP servers of the operator; None: there are none."""
    pooler: Pooler | None = None
    """The pooler of a model that makes vectors or scores; None: it generates text."""
    sharing: Sharing = field(default_factory=Sharing)
    """The limits that are shared with other processes of the server."""
    models: Models | None = None
    """The models where there are several; None: `llm` is the only one."""
    peers: Peers | None = None
    """The other processes of the server; None: there are none."""
    tracer: Tracer | None = None
    """What makes spans of requests; whoever owns the server closes it."""
    tls: SSLContext | None = None
    """The TLS context of connections, where they are encrypted."""
    desk: Desk = field(default_factory=OpenDesk)
    """What keys may have."""
    settling: Settling = field(default_factory=Settling)
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = field(init=False)
    """`system_fingerprint` of answers: while it stays the same, so do seeded ones."""
    keys: KeyRing = field(default_factory=KeyRing)
    """The keys of those who may use the server."""
    usage: UsageBook = field(default_factory=UsageBook)
    """What each of them has used."""
    priorities: dict[str, PriorityRange] = field(default_factory=dict)
    """See `priority_ranges`."""
    batches: BatchRunner = field(init=False)
    running_responses: BackgroundResponses = field(default_factory=BackgroundResponses)
    background: Background = field(init=False)
    """The background work, whose `start` and `stop` the owner of the server calls."""
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self._read_ranges()
        self.fingerprint = fingerprint(self.llm.info)
        self.admission = Admission(self.config.max_concurrent_requests, self.sharing.requests)
        self.llm.share(self.sharing.sequences(self.llm.config.name), self.sharing.texts)
        self.llm.divide(lambda: self.keys.has_several)
        if self.config.enable_log_requests:
            self.llm.tell_requests(PromptLog(self.llm.tokenizer, self.config.max_log_len))

    @property
    def draining(self) -> bool:
        """Nothing new is admitted."""
        return self.admission.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.admission.draining = value

    @property
    def dozes(self) -> bool:
        """The model sleeps because nobody asked for it: the next request wakes it."""
        return self.models is not None and self.models.dozes

    @property
    def in_flight(self) -> int:
        """Generation requests in flight in this process."""
        return self.admission.in_flight

    @property
    def leads(self) -> bool:
        """Whether batches and responses of the background are this process's business."""
        return self.peers is None or self.peers.leads

    async def relay(self, request: Request, body: bytes) -> Response:
        """The answer of the process that leads."""
        assert self.peers is not None, "there is no other process"
        return await self.peers.relay(request, body)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError for a name that is not served. None means the only model."""
        if self.models is not None:
            name = self.models.name_of(name)
        if name is not None and name != self.llm.config.name:
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; served: {self.llm.config.name}",
                param="model",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of this state's model, its own first."""
        own = self.llm.config.name
        return (own,) if self.models is None else (own, *self.models.aliases(own))

    def check_admission(self) -> None:
        """Whether a generation request would be taken now; asked before its body is read. Raises
        OverloadedError while draining or over `max_concurrent_requests`, QueueFullError,
        EngineDeadError."""
        self.admission.check()
        self.llm.check_open()

    async def admit(self, request: Request, num_tokens: int) -> Admitted:
        """Counts a request in flight until what this returns is called. `num_tokens` is what it may
        come to. Raises what `check_admission` raises, and ForbiddenError and RateLimitError for
        what its key may not do."""
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
        """Does what `admit` does for a request that needs no place in the engine: nothing but the
        limits of its key is asked."""
        holder = holder_of(request)
        count = partial(self._count, holder.client)
        return await admitted(
            request, holder, self.names, num_tokens, leave, self.desk, self.settling, count
        )

    def _count(self, client: str, new: KeyUsage) -> None:
        """Counts what a client has used."""
        self.usage.of(client).add(new)
        self.usage.changed()
        label = self.keys.label(client)
        if label is not None:
            self.metrics.count_key(label, new)

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing new and waits until every answer has been sent; False when the time was
        up."""
        self.admission.draining = True
        await self.background.stop()
        done = await self.admission.drain(timeout_s)
        with contextlib.suppress(VllmxError):  # the log has it
            await self.usage.keep()
        return done

    async def end(self) -> None:
        """Drains for as long as the configuration says; what is left then is aborted."""
        logger.info("draining: %d requests in flight", self.in_flight)
        if not await self.drain(self.config.drain_timeout_s):
            logger.warning("drain timed out: %d requests are aborted", self.in_flight)
            if self.models is not None:
                await self.models.close()
            await self.llm.shutdown()  # they end with finish reason "abort"
            await self.drain(CLOSE_S)

    def _read_ranges(self) -> None:
        """Reads the ranges again, in place: the states of other models share them."""
        ranges = priority_ranges(self.config.priority_range, self.config.api_key)
        self.priorities.clear()
        self.priorities.update(ranges | self.keys.priority_ranges())

    def reload(
        self, *, keys: bool = True, certificate: bool = True, level: int = logging.INFO
    ) -> None:
        """Reads the keys and the certificate again. One that cannot be used is logged, and the old
        one stays in use. `level`: of the lines for what can be used."""
        if keys and reload_keys(self.keys, level):
            self._read_ranges()
        if certificate and self.tls is not None:
            reload_certificate(self.config, self.tls, level)


def fingerprint(info: CoreInfo) -> str:
    """A digest of the version, and of what computes the logits."""
    parts = (info.path, info.backend, info.device, info.dtype, info.kv_cache_dtype, info.details)
    digest = hashlib.sha256(repr((__version__, info.weight_bytes, *parts)).encode())
    return f"vllmx-{__version__}-{digest.hexdigest()[:8]}"


def cache_labels(llm: AsyncLLM) -> dict[str, object]:
    """What /metrics says of a model's cache."""
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


def pooler_of(llm: AsyncLLM) -> Pooler | None:
    """The pooler of a model that makes vectors or scores; None for another one."""
    pooling = llm.info.pooling
    return None if pooling is None else EnginePooler(llm, pooling)


def state_of(request: Request) -> ServerState:
    """The state of the model that the request is for, where that is known; else of the default
    one."""
    found = request.scope["state"].get("server")
    return cast(ServerState, found or request.app.state.server)


class Named(Protocol):
    """A body that may name its request."""

    @property
    def request_id(self) -> str | None: ...


class Asking(Protocol):
    """A body that says how urgent it is, and whose prefixes it shares."""

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...


def request_id_of(request: Request, body: Named) -> str:
    """The body's own request_id, or the one of the HTTP request. A name for the answer and for
    logs: clients may give one to several requests."""
    return body.request_id or cast(str, request.scope["state"]["request_id"])


def owner_of(request: Request) -> str:
    """The client whose things a request may see: the API key's name, empty without keys."""
    return cast(str, request.scope["state"].get("client", ""))


def holder_of(request: Request) -> Holder:
    """The holder of the key of a request."""
    return state_of(request).keys.holder(owner_of(request))


def client_of(request: Request) -> str:
    """The client that fair share and budgets count: the API key's name, or without keys the
    address. A batch is another client than who sent it."""
    owner = owner_of(request)
    if "is_batch" in request.scope["state"]:
        return f"{owner} (batch)"
    address = request.scope.get("client")
    return owner or (str(address[0]) if address else "")


def caller_of(request: Request, body: Asking) -> RequestOptions:
    """The client that asks, and how urgently. The prefix-cache salt goes by the API key, so that no
    client can probe another's prompts; a `cache_salt` of the request narrows it further. Raises
    InvalidRequestError for a priority that the key does not allow."""
    client, key, state = client_of(request), owner_of(request), state_of(request)
    priority, queue_timeout_s = BATCH_PRIORITY, 0.0
    is_batch = "is_batch" in request.scope["state"]
    if not is_batch:
        queue_timeout_s = state.config.queue_timeout_s
        priority = state.priorities.get(key, state.priorities[""]).checked(body.priority)
    salt = f"{key}\n{body.cache_salt}" if body.cache_salt else key
    session = getattr(body, "session_id", None) or ""
    log_id = request.scope["state"]["request_id"]
    share = state.keys.holder(key).share
    return RequestOptions(
        priority, client, salt, session, log_id, share, queue_timeout_s, at_end=is_batch
    )
