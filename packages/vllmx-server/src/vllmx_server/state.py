"""What the routes share: the engine, the configuration, the metrics, and who is in flight."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from vllmx_core.errors import ModelNotFoundError
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.wire.messages import CoreInfo

from vllmx_server import __version__
from vllmx_server.body_budget import BodyBudget
from vllmx_server.config import ServerConfig
from vllmx_server.errors import OverloadedError
from vllmx_server.metrics import Metrics
from vllmx_server.priorities import PriorityRange, priority_ranges
from vllmx_server.schema.sampling import SamplingFields


@dataclass(slots=True)
class ServerState:
    """One per server, at `request.app.state.server`."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: Metrics
    bodies: BodyBudget
    draining: bool = False
    in_flight: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = field(init=False)
    """`system_fingerprint` of answers: while it stays the same, so do seeded ones."""
    priorities: dict[str, PriorityRange] = field(init=False)
    """See `priority_ranges`."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.priorities = priority_ranges(self.config.priority_range, self.config.api_key)
        self.fingerprint = fingerprint(self.llm.info)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError for a name that is not served. None means the only model."""
        if name is not None and name != self.llm.config.name:
            raise ModelNotFoundError(
                f"model {name[:200]!r} is not served here; served: {self.llm.config.name}",
                param="model",
            )

    def check_admission(self) -> None:
        """Whether a generation request would be taken now; asked before its body is read. Raises
        OverloadedError while draining or over `max_concurrent_requests`, QueueFullError,
        EngineDeadError."""
        if self.draining:
            raise OverloadedError("the server is shutting down: send the request to another one")
        if self.in_flight >= self.config.max_concurrent_requests:
            raise OverloadedError(
                f"{self.in_flight} requests are in flight, the limit is"
                f" {self.config.max_concurrent_requests}: try again later, or raise"
                " --max-concurrent-requests"
            )
        self.llm.check_open()

    def admit(self) -> Callable[[], None]:
        """Counts a generation request in flight until the returned function is called. Raises what
        `check_admission` raises."""
        self.check_admission()
        self.in_flight += 1
        return self._release

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing new and waits until every answer has been sent; False when the time was
        up."""
        self.draining = True
        if self.in_flight:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def _release(self) -> None:
        self.in_flight -= 1
        if self.draining and not self.in_flight:
            self._idle.set()


def fingerprint(info: CoreInfo) -> str:
    """Of the version, and of what computes the logits."""
    parts = (info.path, info.backend, info.device, info.dtype, info.kv_cache_dtype, info.details)
    digest = hashlib.sha256(repr((__version__, info.weight_bytes, *parts)).encode())
    return f"vllmx-{__version__}-{digest.hexdigest()[:8]}"


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def request_id_of(request: Request, body: SamplingFields) -> str:
    """The body's own request_id, or the one of the HTTP request. A name for the answer and for
    logs: clients may give one to several requests."""
    return body.request_id or cast(str, request.scope["state"]["request_id"])


def client_of(request: Request) -> str:
    """Who asks, for fair share and budgets: the API key's digest, or without keys the address."""
    key: str = request.scope["state"].get("client", "")
    address = request.scope.get("client")
    return key or (str(address[0]) if address else "")


def caller_of(request: Request, body: SamplingFields) -> dict[str, Any]:
    """Who asks, as keyword arguments of `AsyncLLM.submit`. The prefix-cache salt goes by the API
    key, so that no client can probe another's prompts; a `cache_salt` of the request narrows it
    further. Raises InvalidRequestError for a priority that the key does not allow."""
    client, key = client_of(request), request.scope["state"].get("client", "")
    priority = body.priority or 0
    ranges = state_of(request).priorities
    ranges.get(key, ranges[""]).check(priority)
    salt = f"{key}\n{body.cache_salt}" if body.cache_salt else key
    return {"priority": priority, "client": client, "cache_salt": salt}
