"""Traces: records of a request, of which spans are made at its end.

Without `--otlp-traces-endpoint` nothing is kept, and OpenTelemetry is never imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope
    from vllmx_engine.client.request import Request as EngineRequest
    from vllmx_engine.wire.outputs import RequestMetrics

    from vllmx_server.limits.admitted import Admitted

_TRACE = "trace"
"""The key in a request's state."""


@dataclass(frozen=True, slots=True)
class TextTimes:
    """The times of one text that became a vector or a score."""

    num_tokens: int
    text_s: float
    """Seconds of tokenising, before `metrics.arrival_s`."""
    metrics: RequestMetrics


class Generated(Protocol):
    """The engine's work for one HTTP request."""

    @property
    def requests(self) -> Sequence[tuple[EngineRequest, RequestMetrics | None]]:
        """The request to the engine for each prompt, and its times as far as they are known."""
        ...

    @property
    def finish_reasons(self) -> list[str]:
        """Why the choices that have ended did so."""
        ...


@dataclass(slots=True)
class Trace:
    """Records of the parts of the server that a request goes through."""

    model: str = ""
    admitted: Admitted | None = None
    generation: Generated | None = None
    texts: Sequence[TextTimes] = ()
    """Texts that vectors or scores were made of."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An HTTP request at its end; times are seconds of `time.monotonic`."""

    method: str
    route: str
    status: int
    started_s: float
    ended_s: float


class Tracer(Protocol):
    """Makes spans of requests that have ended."""

    def end(self, trace: Trace, ended: Ended, scope: Scope) -> None:
        """Makes the spans of a request. Returns at once, whatever the collector does."""
        ...

    async def close(self) -> None:
        """Sends what is left, for a few seconds at the most."""
        ...


def begin_trace(scope: Scope) -> Trace:
    """The trace of a request from now on."""
    trace = Trace()
    scope["state"][_TRACE] = trace
    return trace


def trace_of(request: Request) -> Trace | None:
    """The trace of a request; None where no traces are wanted."""
    found: Trace | None = request.scope["state"].get(_TRACE)
    return found
