"""Traces: what is kept of a request for the spans that are made at its end.

Without `--otlp-traces-endpoint` nothing is kept, and OpenTelemetry is never imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from vllmx_core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from vllmx_server.generation import Generation
    from vllmx_server.keys.admitted import Admitted
    from vllmx_server.pooling import TextTimes
    from vllmx_server.responses.rounds import ToolRounds

ENVIRONMENT = "env"
"""The endpoint that stands in the variables of OpenTelemetry."""
_FULL, _BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PATH = "/v1/traces"
_EXPORTER = "opentelemetry-exporter-otlp-proto-http"
_TRACE = "trace"
"""The key in a request's state."""


@dataclass(slots=True)
class Trace:
    """What the parts of the server put down of one request, while it goes through them."""

    model: str = ""
    admitted: Admitted | None = None
    generation: Generation | ToolRounds | None = None
    texts: Sequence[TextTimes] = ()
    """What vectors or scores were made of."""


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


def check_endpoint(endpoint: str | None) -> None:
    """Raises ConfigError for what is no address of a collector."""
    if endpoint is None or endpoint == ENVIRONMENT:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"--otlp-traces-endpoint must be the URL of a collector that takes OTLP over HTTP, such"
            f" as http://localhost:4318{_PATH} (not grpc), or {ENVIRONMENT}, got {endpoint!r}",
            param="otlp_traces_endpoint",
        )


def traces_url(endpoint: str | None) -> str | None:
    """The URL that spans are sent to; None: there are none. The variables of OpenTelemetry are
    read where the endpoint says so, and not else. Raises ConfigError."""
    if endpoint != ENVIRONMENT:
        if endpoint is None or urlsplit(endpoint).path.strip("/"):
            return endpoint
        return endpoint.rstrip("/") + _PATH
    found = os.environ.get(_FULL)
    if not found and os.environ.get(_BASE):
        found = os.environ[_BASE].rstrip("/") + _PATH
    if not found:
        raise ConfigError(
            f"--otlp-traces-endpoint {ENVIRONMENT}: neither {_FULL} nor {_BASE} is set",
            param="otlp_traces_endpoint",
        )
    check_endpoint(found)
    return found


def check_tracing(endpoint: str | None) -> None:
    """Raises ConfigError where traces are asked for and cannot be made."""
    if traces_url(endpoint) is None:
        return
    try:
        metadata.version(_EXPORTER)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'vllmx[otel]'",
            param="otlp_traces_endpoint",
        ) from None


def open_tracer(endpoint: str | None) -> Tracer | None:
    """The tracer that a configuration asks for. Raises ConfigError."""
    url = traces_url(endpoint)
    if url is None:
        return None
    check_tracing(endpoint)
    from vllmx_server.spans import SpanTracer

    return SpanTracer(url)
