"""Spans of OpenTelemetry: one for each request to a model, with children for the parts of its time.

They are made after the request has ended, from times that the engine reports anyway, so they cost
no time per token. A thread of OpenTelemetry sends them from a bounded queue, which drops the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope
from vllmx_core.system.private_traceback import private_traceback
from vllmx_engine.client.request import Request
from vllmx_engine.wire.outputs import RequestMetrics

from vllmx_server import __version__
from vllmx_server.watch.tracing import Ended, TextTimes, Trace

logger = logging.getLogger("vllmx.tracing")

MAX_PROMPTS = 8
"""The most prompts of one request whose times become spans."""
CLOSE_S = 3.0
_QUIET_S = 60.0
"""Seconds between two lines of the log about a collector that fails."""
_HEADERS = (b"traceparent", b"tracestate")

Attributes = dict[str, str | bool | int | float | Sequence[str]]
_Part = tuple[str, float, float, Attributes]
"""The name of a child span, its begin and its end."""


class SpanTracer:
    """A `vllmx_server.watch.tracing.Tracer` that sends spans to a collector by OTLP over HTTP.

    Args:
        url: of the collector.
        operations: `gen_ai.operation.name` of the paths that ask a model; the others have no spans.
        exporter: in place of the one that sends to `url`.
    """

    def __init__(
        self, url: str, operations: Mapping[str, str], exporter: SpanExporter | None = None
    ) -> None:
        self._operations = operations
        resource = {SERVICE_VERSION: __version__}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource[SERVICE_NAME] = "vllmx"
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # see `_Exporter`
        sends = exporter or OTLPSpanExporter(endpoint=url)
        self._processor = BatchSpanProcessor(_Exporter(sends, url))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("vllmx", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def end(self, trace: Trace, ended: Ended, scope: Scope) -> None:
        operation = self._operations.get(ended.route)
        if operation is None:
            return
        try:
            self._end(operation, trace, ended, self._parent(scope))
        except Exception as error:  # a request must not fail for its trace
            logger.error("a trace cannot be made\n%s", private_traceback(error))

    async def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)

    def _parent(self, scope: Scope) -> Context:
        """The span of the client, where it names one."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        return self._propagator.extract(carrier)

    def _end(self, operation: str, trace: Trace, ended: Ended, parent: Context) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        name = f"{operation} {trace.model}" if trace.model else f"{ended.method} {ended.route}"
        span = self._tracer.start_span(
            name,
            parent,
            SpanKind.SERVER,
            _of_call(operation, trace, ended),
            start_time=at(ended.started_s),
        )
        if span.is_recording():
            span.set_attributes(_of_result(trace))
            if ended.status >= 500 or "error" in _reasons(trace):
                span.set_attribute("error.type", str(ended.status))
                span.set_status(StatusCode.ERROR)
            within = set_span_in_context(span)
            for part, begin_s, end_s, attributes in _parts(trace):
                child = self._tracer.start_span(
                    part, within, attributes=attributes, start_time=at(begin_s)
                )
                child.end(at(max(begin_s, end_s)))
        span.end(at(ended.ended_s))


class _Exporter(SpanExporter):
    """An exporter that logs its failures once a minute."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner = inner
        self._host = urlsplit(url).netloc.rpartition("@")[2]
        self._num_lost = 0
        self._silent_until = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result, why = self._inner.export(spans), "it takes none"
        except Exception as error:
            result, why = SpanExportResult.FAILURE, type(error).__name__
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            now_s = time.monotonic()
            if now_s >= self._silent_until:
                self._silent_until = now_s + _QUIET_S
                text = "%d spans could not be sent to the collector at %s: %s"
                logger.warning(text, self._num_lost, self._host, why)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _of_call(operation: str, trace: Trace, ended: Ended) -> Attributes:
    """The call, which a sampler may look at."""
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllmx",
        "http.request.method": ended.method,
        "http.route": ended.route,
        "http.response.status_code": ended.status,
        "gen_ai.latency.e2e": ended.ended_s - ended.started_s,
    }
    if trace.model:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = trace.model
    return found


def _of_result(trace: Trace) -> Attributes:
    """Numbers of the answer and its settings, without any text of either side."""
    found: Attributes = {}
    usage = None if trace.admitted is None else trace.admitted.usage
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if trace.texts:
        times = trace.texts[0].metrics
        found |= _latencies(times, times.last_token_s, None)
    if trace.generation is None:
        return found
    found["gen_ai.response.finish_reasons"] = _reasons(trace)
    request, known = trace.generation.requests[0]
    params = request.params
    found |= {
        "gen_ai.request.id": request.core[0].log_id,
        "gen_ai.request.max_tokens": request.core[0].max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
    }
    if known is not None:
        found |= _latencies(known, known.first_token_s, request.text_s)
    return found


def _latencies(times: RequestMetrics, first_s: float | None, text_s: float | None) -> Attributes:
    """Seconds, under vLLM's names.

    Args:
        first_s: when the first token was there.
        text_s: seconds before `times.arrival_s`; None: nothing is decoded.
    """
    last_s = times.last_token_s
    if first_s is None or last_s is None:
        return {}
    begun_s = min(times.arrival_s + times.queue_s, first_s)
    found: Attributes = {
        "gen_ai.latency.time_in_queue": begun_s - times.arrival_s,
        "gen_ai.latency.time_in_model_prefill": first_s - begun_s,
        "gen_ai.latency.time_in_model_inference": last_s - begun_s,
    }
    if text_s is not None:
        found["gen_ai.latency.time_to_first_token"] = first_s - times.arrival_s + text_s
        found["gen_ai.latency.time_in_model_decode"] = last_s - first_s
    return found


def _reasons(trace: Trace) -> list[str]:
    return [] if trace.generation is None else trace.generation.finish_reasons


def _parts(trace: Trace) -> Iterator[_Part]:
    """The parts of the time of each prompt, or of each text, in order."""
    for index, text in enumerate(islice(trace.texts, MAX_PROMPTS)):
        which = {"vllmx.prompt.index": index} if len(trace.texts) > 1 else {}
        yield from _parts_of_text(text, which)
    if trace.generation is None:
        return
    requests = trace.generation.requests
    for index, (request, times) in enumerate(islice(requests, MAX_PROMPTS)):
        which = {"vllmx.prompt.index": index} if len(requests) > 1 else {}
        yield from _parts_of(request, times, which)


def _parts_of(
    request: Request, times: RequestMetrics | None, which: Mapping[str, int]
) -> Iterator[_Part]:
    text_s = request.arrival_s - request.text_s
    if request.core[0].grammar is not None:
        yield "grammar", text_s - request.grammar_s, text_s, {**which}
    yield "render", text_s, request.arrival_s, {**which}
    if times is None or times.first_token_s is None or times.last_token_s is None:
        return
    yield from _until_first(times, times.first_token_s, len(request.prompt_ids), which)
    size: Attributes = {"gen_ai.usage.output_tokens": times.num_generation_tokens}
    yield "decode", times.first_token_s, times.last_token_s, {**which, **size}


def _parts_of_text(text: TextTimes, which: Mapping[str, int]) -> Iterator[_Part]:
    times = text.metrics
    yield "render", times.arrival_s - text.text_s, times.arrival_s, {**which}
    if times.last_token_s is not None:
        yield from _until_first(times, times.last_token_s, text.num_tokens, which)


def _until_first(
    times: RequestMetrics, first_s: float, num_tokens: int, which: Mapping[str, int]
) -> Iterator[_Part]:
    begun_s = min(times.arrival_s + times.queue_s, first_s)
    yield "queue", times.arrival_s, begun_s, {**which}
    size: Attributes = {"gen_ai.usage.input_tokens": num_tokens}
    yield "prefill", begun_s, first_s, {**which, **size}
