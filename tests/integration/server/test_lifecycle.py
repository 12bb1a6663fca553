"""What only whole processes show: signals, the death of the core, sockets, exit codes."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked
from tests.waiting import PATIENCE_S, wait_until

from .conftest import PLAIN, MakeFake, RunningServer

PATH = "/v1/completions"


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def stream(
    server: RunningServer, max_tokens: int, begun: threading.Event | None = None
) -> list[Any]:
    """The events of a streamed answer; "broken" last when the connection broke."""
    events: list[Any] = []
    request = body(max_tokens, stream=True)
    try:
        with httpx.stream("POST", server.url + PATH, json=request, **PLAIN) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    text = line[6:]
                    events.append(text if text == "[DONE]" else json.loads(text))
                    if begun:
                        begun.set()
    except httpx.TransportError:
        events.append("broken")
    return events


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared(fake_server: MakeFake) -> Iterator[RunningServer]:
    with fake_server("--drain-timeout-s", "20") as server:
        yield server


def running(server: RunningServer, count: int) -> None:
    wait_until(lambda: server.metric("num_requests_running") == count)


def test_the_death_of_the_core(
    shared: RunningServer, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    begun = threading.Event()  # before its first event a stream would end as an ordinary answer
    streamed = pool.submit(stream, shared, 500, begun)
    whole = pool.submit(shared.post, PATH, body(500))
    running(shared, 2)
    assert begun.wait(PATIENCE_S)
    os.kill(shared.core_pid(), signal.SIGKILL)
    wait_until(lambda: shared.get("/health").status_code == 503)
    refused = shared.post(PATH, body(1))
    assert refused.status_code in (503, 200)
    events = streamed.result()
    assert events[0]["choices"][0]["text"]
    assert events[-2]["error"]["code"] == "engine_unavailable"
    assert "restarted" in events[-2]["error"]["message"]
    assert events[-1] == "[DONE]"
    answer = whole.result()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    wait_until(lambda: shared.get("/health").status_code == 200)
    assert shared.get("/health/live").status_code == 200
    assert shared.post(PATH, body(3)).json()["usage"]["completion_tokens"] == 3
    shared.becomes_idle()


def test_a_disconnect_frees_all_blocks(shared: RunningServer) -> None:
    for streamed in (True, False):
        request = body(500, stream=streamed, n=3)
        with socket.create_connection(("127.0.0.1", int(shared.url.rpartition(":")[2]))) as client:
            payload = json.dumps(request).encode()
            client.sendall(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (PATH.encode(), len(payload), payload)
            )
            running(shared, 3)
            assert shared.metric("kv_cache_usage_perc") > 0
        shared.becomes_idle()


def test_sigterm_lets_streams_end(
    fake_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with fake_server(unforked=True) as server:
        begun = [threading.Event() for _ in range(3)]
        streams = [pool.submit(stream, server, 250, each) for each in begun]
        assert all(each.wait(PATIENCE_S) for each in begun)
        core = server.core_pid()
        os.kill(core, signal.SIGSTOP)  # no stream ends before what is asked here
        try:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in server.get("/health").text)
            refused = server.post(PATH, body(1))
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        finally:
            os.kill(core, signal.SIGCONT)
        for found in streams:
            events = found.result()
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE_S) == 0
        assert not any("Traceback" in line for line in server.lines)


def test_a_drain_that_takes_too_long_aborts(
    fake_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with fake_server("--drain-timeout-s", "0.3") as server:
        found = pool.submit(stream, server, 1000)
        running(server, 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        events = found.result()
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
        assert events[-1] == "[DONE]"


def test_the_second_signal_stops_at_once(
    fake_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with fake_server(unforked=True) as server:
        core = server.core_pid()
        found = pool.submit(stream, server, 1000)
        running(server, 1)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/health").status_code == 503)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        server.process.wait(PATIENCE_S)
        events = found.result()
        assert events[-1] in ("broken", "[DONE]")
        assert '"length"' not in json.dumps(events), "the stream came to its end"
        wait_until(lambda: not Path(f"/proc/{core}").exists())
        assert not any("Traceback" in line for line in server.lines)


def test_a_unix_socket(fake_server: MakeFake, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with fake_server("--uds", str(path), "--api-key", "secret") as server:
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(
            transport=transport, base_url="http://server", timeout=PATIENCE_S
        ) as client:
            assert client.get("/health").status_code == 200
            assert client.post(PATH, json=body(2)).status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert client.post(PATH, json=body(2), headers=headers).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "{taken}"],
        ["--port", "70000"],
        ["--log-level", "loud"],
        ["--ssl-certfile", "missing.pem", "--ssl-keyfile", "missing.pem"],
        ["--host", "203.0.113.1"],
        ["--model", "/no/such/folder"],
        ["--port", "0", "--data-dir", "/dev/null"],
        ["--port", "0", "--api-keys-file", "/dev/null"],
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    shared: RunningServer, flags: list[str]
) -> None:
    taken = shared.url.rpartition(":")[2]
    done = forked.run("serve", *(flag.format(taken=taken) for flag in flags))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")


def test_a_step_that_hangs(
    hanging_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with hanging_server("--step-timeout", "0.5") as server:
        begun = threading.Event()
        streamed = pool.submit(stream, server, 500, begun)
        whole = pool.submit(server.post, PATH, body(500))
        events = streamed.result()
        assert events[0]["choices"][0]["text"]
        assert events[-2]["error"]["code"] == "step_timeout"
        assert "hangs" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "step_timeout")
        assert answer.headers["retry-after"]
        health = server.get("/health")
        assert health.status_code == 200 or "hangs" in health.json()["message"]
        wait_until(lambda: server.get("/health").status_code == 200)
        assert server.post(PATH, body(2)).json()["usage"]["completion_tokens"] == 2
        wait_until(lambda: any("time.sleep(self.hang_s)" in line for line in server.lines))
        assert any("of prompts with" in line for line in server.lines)
        name = events[0]["id"].removeprefix("cmpl-")
        assert any("requests in it" in line and name in line for line in server.lines)


def test_health_tells_of_a_core_that_stands_still(fake_server: MakeFake) -> None:
    with fake_server() as server:
        core = server.core_pid()
        os.kill(core, signal.SIGSTOP)
        try:
            wait_until(lambda: server.get("/health").status_code == 503)
            health = server.get("/health").json()
            assert health["status"] == "unresponsive"
            assert "has not answered" in health["message"]
            assert server.get("/health/live").status_code == 200
        finally:
            os.kill(core, signal.SIGCONT)
        wait_until(lambda: server.get("/health").status_code == 200)
        assert server.core_pid() == core
        assert server.post(PATH, body(3)).json()["usage"]["completion_tokens"] == 3


def test_a_long_step_is_no_silence(
    hanging_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with hanging_server() as server:
        begun = threading.Event()
        found = pool.submit(stream, server, 500, begun)
        assert begun.wait(PATIENCE_S)
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            assert server.get("/health").status_code == 200
            time.sleep(0.1)
        server.process.kill()
        assert found.result()[-1] == "broken"


def test_sigterm_while_a_step_hangs(
    hanging_server: MakeFake, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with hanging_server("--drain-timeout-s", "0.5") as server:
        found = pool.submit(stream, server, 500)
        running(server, 1)
        time.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert found.result()[-1] in ("broken", "[DONE]")


def test_a_server_whose_engine_is_gone_for_good_ends(
    fake_server: MakeFake, fake_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(fake_model, tmp_path / "model")
    with fake_server("--model", str(copy)) as server:
        shutil.rmtree(copy)
        os.kill(server.core_pid(), signal.SIGKILL)
        assert server.process.wait(PATIENCE_S) == 1
        wait_until(lambda: any(line.startswith("error: ") for line in server.lines))
    assert any("error: the engine core is gone" in line for line in server.lines)
