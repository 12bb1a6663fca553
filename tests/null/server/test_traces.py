"""Spans of requests, as a collector gets them, and collectors that get nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from vllmx_core.errors import ConfigError
from vllmx_engine.wire.outputs import RequestMetrics
from vllmx_server.config import ServerConfig
from vllmx_server.generating.pooling import Pooled
from vllmx_server.watch.collector import check_tracing, open_tracer, traces_url
from vllmx_server.watch.tracing import TextTimes

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_pooling import LetterPooler

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="vllmx[otel] is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SECRET = "hush5ecret"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Span:
    """One that a collector got, in plain values."""

    def __init__(self, found: Any) -> None:
        self.name: str = found.name
        self.trace: str = found.trace_id.hex()
        self.own: str = found.span_id.hex()
        self.parent: str = found.parent_span_id.hex()
        self.kind: int = found.kind
        self.failed: bool = found.status.code == 2
        self.begin, self.end = found.start_time_unix_nano, found.end_time_unix_nano
        self.values = {each.key: _plain(each.value) for each in found.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """Takes spans over HTTP, after `delay_s`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.hold = threading.Event()
        """While it is not set nobody is answered."""
        self.hold.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.hold.wait(PATIENCE_S)
                collector.paths.append(self.path)
                collector.bodies.append(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing is said."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self) -> list[Span]:
        """All that came so far, the one that began first at first."""
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found += [Span(span) for scope in resource.scope_spans for span in scope.spans]
        return sorted(found, key=lambda span: (span.begin, span.name))


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


async def flushed(served: Served, collector: Collector, num_requests: int) -> list[Span]:
    """The spans of so many requests. They are made when the client has its answer already."""
    tracer: Any = served.server.tracer
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await asyncio.to_thread(tracer._provider.force_flush)
            found = collector.spans()
            if sum(span.kind == 2 for span in found) == num_requests:
                return found
            await asyncio.sleep(0.01)


async def ask_all(served: Served) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    talk = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "ignore_eos": True}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["ab"]}}}
    for body in (talk, {**talk, "stream": True}, {**talk, "response_format": schema}):
        url = "/v1/chat/completions"
        response = await served.client.post(url, json=body, headers=headers)
        assert response.status_code == 200, response.text
    prompts = {"prompt": [SECRET, "b"], "max_tokens": 3, "ignore_eos": True, "n": 2}
    assert (await served.post("/v1/completions", **prompts)).status_code == 200
    assert (await served.post("/v1/completions", prompt=SECRET, nothing=1)).status_code == 400
    assert (await served.client.get("/v1/models")).status_code == 200


async def test_a_span_for_each_request_with_its_parts(
    make_server: MakeServer, collector: Collector
) -> None:
    async with make_server({"otlp_traces_endpoint": collector.url}, step_s=0.002) as served:
        await ask_all(served)
        spans = await flushed(served, collector, 5)
        await served.server.tracer.close()  # type: ignore[union-attr]
    assert set(collector.paths) == {"/v1/traces"}
    roots = [span for span in spans if span.kind == 2]
    assert [root.name for root in roots] == [
        *["chat fake"] * 3,
        "text_completion fake",
        "POST /v1/completions",
    ]
    for root in roots[:3]:  # the client's trace goes on
        assert (root.trace, root.parent) == (TRACE, PARENT)
        assert root.values["gen_ai.request.id"] == "mine"
    assert roots[3].trace != TRACE
    for index, root in enumerate(roots[:4]):
        parts = [span for span in spans if span.parent == root.own]
        names = ["render", "queue", "prefill", "decode"]
        names = ["grammar", *names] if index == 2 else names * (2 if index == 3 else 1)
        assert sorted(part.name for part in parts) == sorted(names)
        for part in parts:
            assert part.trace == root.trace
            assert root.begin <= part.begin <= part.end <= root.end
        check_values(root.values)
    assert roots[0].values["gen_ai.usage.output_tokens"] == 4
    assert roots[3].values["gen_ai.usage.output_tokens"] == 12
    assert roots[4].values["http.response.status_code"] == 400
    assert not any(root.failed for root in roots)
    for body in collector.bodies:
        assert SECRET.encode() not in body, "texts of requests are no business of a collector"


def check_values(values: dict[str, Any]) -> None:
    assert values["gen_ai.request.model"] == "fake"
    assert values["gen_ai.usage.input_tokens"] > 0
    assert values["gen_ai.response.finish_reasons"]
    latency = {name: value for name, value in values.items() if ".latency." in name}
    assert len(latency) == 6
    assert all(0 <= value <= latency["gen_ai.latency.e2e"] for value in latency.values())


class TimedPooler(LetterPooler):
    """Each text waits for 2 ms and is computed in 3."""

    async def pool(self, *args: Any) -> list[Pooled]:
        now_s = time.monotonic()
        times = RequestMetrics(now_s, now_s + 0.005, now_s + 0.005, queue_s=0.002)
        await asyncio.sleep(0.006)
        return [
            msgspec.structs.replace(each, texts=[TextTimes(each.num_tokens, 0.0, times)])
            for each in await super().pool(*args)
        ]


async def test_texts_that_become_vectors_have_their_parts(
    make_server: MakeServer, collector: Collector
) -> None:
    async with make_server({"otlp_traces_endpoint": collector.url}) as served:
        served.state.pooler = TimedPooler()
        answer = await served.post("/v1/embeddings", input=["abc", "de"])
        assert answer.status_code == 200, answer.text
        (root, *parts) = await flushed(served, collector, 1)
        await served.server.tracer.close()  # type: ignore[union-attr]
        text = (await served.client.get("/metrics")).text
    assert (root.name, root.values["gen_ai.usage.input_tokens"]) == ("embeddings fake", 5)
    assert root.values["gen_ai.latency.time_in_queue"] == pytest.approx(0.002)
    assert sorted(part.name for part in parts) == [
        "prefill",
        "prefill",
        "queue",
        "queue",
        *["render"] * 2,
    ]
    for part in parts:
        assert (part.parent, part.trace) == (root.own, root.trace)
        assert root.begin <= part.begin <= part.end <= root.end
    prefills = [part for part in parts if part.name == "prefill"]
    assert {part.values["gen_ai.usage.input_tokens"] for part in prefills} == {2, 3}
    for name, count in (("queue", 2.0), ("prefill", 2.0), ("inference", 2.0), ("decode", 0.0)):
        assert f'request_{name}_time_seconds_count{{model_name="fake"}} {count}\n' in text


async def test_what_fails_is_an_error(make_server: MakeServer, collector: Collector) -> None:
    flags = {"otlp_traces_endpoint": collector.url}
    async with make_server(flags, nan_token=7, step_s=0.005) as served:
        await served.post("/v1/completions", prompt=[1, 7], max_tokens=2)
        body = {"prompt": "a", "allowed_token_ids": [7], "max_tokens": 9, "stream": True}
        await served.post("/v1/completions", **body)
        found = await flushed(served, collector, 2)
        whole, stream = [span for span in found if span.kind == 2]
        await served.server.tracer.close()  # type: ignore[union-attr]
    assert (whole.failed, whole.values["http.response.status_code"]) == (True, 500)
    assert stream.failed, "whether its status was sent already or not"
    assert stream.values["gen_ai.response.finish_reasons"] == ["error"]


async def test_nobody_traces_what_its_client_does_not(
    make_server: MakeServer, collector: Collector
) -> None:
    """The decision of a client's trace holds for ours."""
    async with make_server({"otlp_traces_endpoint": collector.url}) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        body = {"prompt": "a", "max_tokens": 2}
        await served.client.post("/v1/completions", json=body, headers=headers)
        headers = {"traceparent": "nonsense\x7f", "tracestate": "," * 600}
        answer = await served.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        (root, *parts) = await flushed(served, collector, 1)
        assert not root.parent
        assert len(parts) == 4
        await served.server.tracer.close()  # type: ignore[union-attr]


async def test_a_dead_collector_and_a_slow_one_harm_nothing(
    make_server: MakeServer,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Many more requests than the queue holds; who closes waits a bounded time."""
    for name, value in (
        ("OTEL_BSP_MAX_QUEUE_SIZE", "8"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vllmx_server.watch.spans.CLOSE_S", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        collector.hold.clear()
        for url in (dead, collector.url):
            async with make_server({"otlp_traces_endpoint": url}) as served:
                for _ in range(20):
                    await served.complete(max_tokens=2)
                tracer: Any = served.server.tracer
                assert len(tracer._processor._batch_processor._queue) <= 8
                begun_s = time.monotonic()
                await tracer.close()
                assert time.monotonic() - begun_s < 0.5 * PATIENCE_S
    lines = [record for record in caplog.records if record.name == "vllmx.tracing"]
    assert len(lines) <= 2, "a line a minute"
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    base, full = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    for name in (base, full):
        monkeypatch.delenv(name, raising=False)
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a/own/path") == "https://a/own/path"
    with pytest.raises(ConfigError, match="neither"):
        check_tracing("env")
    monkeypatch.setenv(base, "http://b:1")
    assert traces_url(None) is None, "a variable alone starts nothing"
    assert open_tracer(None, {}) is None
    assert traces_url("env") == "http://b:1/v1/traces"
    monkeypatch.setenv(full, "http://c:1/x")
    assert traces_url("env") == "http://c:1/x"
    monkeypatch.setenv(full, "grpc://c:1")
    with pytest.raises(ConfigError, match="not grpc"):
        traces_url("env")
    for wrong in ("", "localhost:4317", "grpc://a:4317", "http://", "http://a:x", "http://[a"):
        with pytest.raises(ConfigError, match="OTLP over HTTP"):
            ServerConfig(otlp_traces_endpoint=wrong)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise __import__("importlib").metadata.PackageNotFoundError(name)

    monkeypatch.setattr("vllmx_server.watch.collector.metadata.version", missing)
    with pytest.raises(ConfigError, match=r"vllmx\[otel\]"):
        check_tracing("http://a:1")


async def test_without_the_flag_nothing_is_kept(served: Served) -> None:
    assert served.server.tracer is None
    assert json.dumps(await served.complete(max_tokens=1))
