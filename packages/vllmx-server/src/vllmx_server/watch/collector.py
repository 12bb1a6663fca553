"""The address of the collector of traces, and the tracer that sends to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllmx_core.errors import ConfigError

if TYPE_CHECKING:
    from vllmx_server.watch.tracing import Tracer

ENVIRONMENT = "env"
"""Has the endpoint read from the variables of OpenTelemetry."""
_FULL, _BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PATH = "/v1/traces"
_EXPORTER = "opentelemetry-exporter-otlp-proto-http"


def check_endpoint(endpoint: str | None) -> None:
    """Raises ConfigError unless it is the address of a collector."""
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
    """The URL that spans are sent to; None: there are none. The variables of OpenTelemetry are read
    only if the endpoint says so. Raises ConfigError."""
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
    """Raises ConfigError if traces are wanted and cannot be made."""
    if traces_url(endpoint) is None:
        return
    try:
        metadata.version(_EXPORTER)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'vllmx[otel]'",
            param="otlp_traces_endpoint",
        ) from None


def open_tracer(endpoint: str | None, operations: Mapping[str, str]) -> Tracer | None:
    """The tracer that a configuration asks for. `operations`: `gen_ai.operation.name` by path.
    Raises ConfigError."""
    url = traces_url(endpoint)
    if url is None:
        return None
    check_tracing(endpoint)
    from vllmx_server.watch.spans import SpanTracer

    return SpanTracer(url, operations)
