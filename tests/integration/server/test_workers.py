"""Several API processes over one core: their deaths, their end, what they count together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from vllmx_server.limits.key_records import digest_of

from tests import forked
from tests.waiting import PATIENCE_S, wait_until

from .conftest import PLAIN, MakeFake, RunningServer

LONG = {"model": "fake", "prompt": "ab", "max_tokens": 4000, "stream": True}
SHORT = {"model": "fake", "prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def workers(
    fake_server: MakeFake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    flags = ("--chat-template", str(template), "--reasoning-parser", "qwen3")
    with fake_server("--api-workers", "2", *flags) as server:
        yield server


def worker_pids(server: RunningServer) -> list[int]:
    return server.child_pids("vllmx_server.host.worker")


def worker_of(client: httpx.Client, server: RunningServer) -> int:
    """The worker that a client's only connection is with."""
    stream = client._transport._pool.connections[0]._connection._network_stream  # type: ignore[attr-defined]
    return holders([stream.get_extra_info("client_addr")[1]], server)[0]


def holders(ports: list[int], server: RunningServer) -> list[int]:
    """The workers that the connections from these ports are with."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].split(":")[1], 16) in ports:
            inodes.add(f"socket:[{fields[9]}]")
    found = []
    for pid in worker_pids(server):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(link) in inodes:
                    found.append(pid)
    assert len(found) == len(ports), "nobody has some of the connections"
    return found


class Stream:
    """A streamed answer that has begun, over a connection of its own."""

    def __init__(self, server: RunningServer) -> None:
        self.client = httpx.Client(**PLAIN)
        self._context = self.client.stream("POST", server.url + "/v1/completions", json=LONG)
        self.response = self._context.__enter__()
        self.lines = self.response.iter_lines()
        next(self.lines)
        self.worker = worker_of(self.client, server)

    def close(self) -> None:
        self.response.close()
        self.client.close()


def streams_on_both(server: RunningServer) -> dict[int, Stream]:
    """One stream on each worker: connections are opened until both have one."""
    found: dict[int, Stream] = {}
    for _ in range(200):
        stream = Stream(server)
        if stream.worker in found:
            stream.close()
        else:
            found[stream.worker] = stream
        if len(found) == 2:
            return found
    raise AssertionError("one worker takes all connections")


def test_workers_that_start_again_wake_a_model_that_was_unloaded(fake_server: MakeFake) -> None:
    with fake_server("--api-workers", "2", "--idle-unload-s", "0.2") as server:
        wait_until(lambda: server.get("/v1/models").json()["data"][0]["state"] == "unloaded")
        before = worker_pids(server)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(set(worker_pids(server)) - set(before)) == 2)
        body = {"prompt": "ab", "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200


def test_a_killed_worker_ends_its_own_streams_alone(workers: RunningServer) -> None:
    before = worker_pids(workers)
    streams = streams_on_both(workers)
    victim, other = streams.values()
    os.kill(victim.worker, signal.SIGKILL)
    with pytest.raises(httpx.HTTPError):
        for _ in victim.lines:
            pass
    for _ in range(20):
        next(other.lines)  # goes on
    wait_until(lambda: len(set(worker_pids(workers)) - set(before)) == 1)
    other.close()
    workers.becomes_idle()
    assert workers.core_pid() in workers.child_pids("link.process")
    wait_until(lambda: workers.post("/v1/completions", SHORT).status_code == 200)


def test_streams_land_evenly(workers: RunningServer) -> None:
    """Those that come at once, over connections of their own."""
    address = urlsplit(workers.url)
    body = json.dumps(LONG | {"max_tokens": 1000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def both_serve() -> bool:
        with contextlib.ExitStack() as stack:
            probes = [
                stack.enter_context(socket.create_connection((address.hostname, address.port)))
                for _ in range(4)
            ]
            for probe in probes:
                probe.sendall(
                    f"GET /health/live HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
                )
            for probe in probes:
                assert probe.recv(12) == b"HTTP/1.1 200"
            return len(set(holders([probe.getsockname()[1] for probe in probes], workers))) == 2

    wait_until(both_serve)  # one may still start, or start again
    streams = [socket.create_connection((address.hostname, address.port)) for _ in range(60)]
    try:
        for stream in streams:
            stream.sendall(head + body)
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        held = Counter(holders([stream.getsockname()[1] for stream in streams], workers))
    finally:
        for stream in streams:
            stream.close()
    assert len(held) == 2
    assert 24 <= min(held.values()) <= max(held.values()) <= 36
    workers.becomes_idle()


def test_counters_are_those_of_the_whole_server(workers: RunningServer) -> None:
    """Whichever process answers: each scrape has a connection of its own."""
    before = workers.metric("request_success_total")
    for _ in range(6):
        assert workers.post("/v1/completions", SHORT).status_code == 200
    wait_until(lambda: workers.metric("request_success_total") == before + 6)
    assert {workers.metric("request_success_total") for _ in range(6)} == {before + 6}
    used = workers.get("/v1/usage").json()
    pids = worker_pids(workers)
    for pid in pids:  # and their counts outlive them
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_up(workers) and not set(worker_pids(workers)) & set(pids))
    assert workers.metric("request_success_total") == before + 6
    assert workers.get("/v1/usage").json() == used


def is_up(server: RunningServer) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def has_status(server: RunningServer, path: str, status: str) -> bool:
    return bool(server.get(path).json()["status"] == status)


def test_files_and_batches_work_from_each_worker(workers: RunningServer) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": SHORT}
    upload = {"file": ("in.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    file = workers.post("/v1/files", files=upload).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batches = [workers.post("/v1/batches", body).json() for _ in range(4)]
    for batch in batches:
        path = f"/v1/batches/{batch['id']}"
        wait_until(partial(has_status, workers, path, "completed"))
    assert len(workers.get("/v1/batches").json()["data"]) == 4
    output = workers.get(path).json()["output_file_id"]
    for _ in range(4):
        found = json.loads(workers.get(f"/v1/files/{output}/content").content)
        assert found["response"]["status_code"] == 200


def test_batches_of_messages_work_from_each_worker(workers: RunningServer) -> None:
    params = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    for _ in range(4):
        path = f"/v1/messages/batches/{workers.post('/v1/messages/batches', body).json()['id']}"
        wait_until(lambda where=path: workers.get(where).json()["processing_status"] == "ended")
        found = workers.get(path + "/results").json()
        assert found["result"]["message"]["type"] == "message"
    listed = workers.get("/v1/messages/batches").json()["data"]
    assert len(listed) == 4


def test_conversations_work_from_each_worker(workers: RunningServer) -> None:
    name = workers.post("/v1/conversations", {}).json()["id"]
    body = {"model": "fake", "input": "hi", "conversation": name, "max_output_tokens": 4}
    for background in (False, True) * 2:
        made = workers.post("/v1/responses", {**body, "background": background}).json()
        wait_until(partial(has_status, workers, f"/v1/responses/{made['id']}", "incomplete"))
    items = workers.get(f"/v1/conversations/{name}/items").json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"] * 4


def test_responses_of_the_background_are_found_from_each_worker(workers: RunningServer) -> None:
    body = {"model": "fake", "input": "hi", "background": True, "max_output_tokens": 4}
    for _ in range(4):
        made = workers.post("/v1/responses", body).json()
        path = f"/v1/responses/{made['id']}"
        wait_until(partial(has_status, workers, path, "incomplete"))
    body = body | {"stream": True, "max_output_tokens": 4}
    for _ in range(4):
        text = workers.post("/v1/responses", body).text
        assert "response.created" in text
        assert "response.incomplete" in text


def test_a_dead_core_is_told_to_all(workers: RunningServer) -> None:
    streams = streams_on_both(workers)
    core = workers.core_pid()
    os.kill(core, signal.SIGKILL)
    for stream in streams.values():
        rest = "".join(stream.lines)
        assert "engine_unavailable" in rest
        stream.close()
    wait_until(lambda: len(workers.child_pids("link.process")) == 1)
    wait_until(lambda: workers.post("/v1/completions", SHORT).status_code == 200)
    assert workers.core_pid() != core


def test_sigterm_drains_all_and_leaves_nobody_behind(fake_server: MakeFake) -> None:
    with fake_server("--api-workers", "2", "--drain-timeout-s", "60") as server:
        pids = [*worker_pids(server), server.core_pid()]
        body = SHORT | {"max_tokens": 40, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, **PLAIN) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(PATIENCE_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_hangup_has_every_process_read_its_keys_again(
    fake_server: MakeFake, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"

    def write(name: str) -> None:
        record = {"name": name, "sha256": digest_of(f"secret-{name}")}
        path.write_text(json.dumps({"keys": [record]}))

    def status(client: httpx.Client, name: str) -> int:
        headers = {"authorization": f"Bearer secret-{name}"}
        return client.get(f"{server.url}/v1/models", headers=headers).status_code

    write("old")
    flags = ("--api-workers", "2", "--api-keys-file", str(path))
    with fake_server(*flags) as server, contextlib.ExitStack() as opened:
        clients: dict[int, httpx.Client] = {}
        while len(clients) < 2:
            client = opened.enter_context(httpx.Client(**PLAIN))
            assert (status(client, "old"), status(client, "new")) == (200, 401)
            clients.setdefault(worker_of(client, server), client)
        path.write_text("{")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the keys stay as they are" in "".join(server.lines))
        assert {status(client, "old") for client in clients.values()} == {200}
        write("new")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: {status(each, "new") for each in clients.values()} == {200})
        wait_until(lambda: {status(each, "old") for each in clients.values()} == {401})
        log = "".join(server.lines)
        assert (log.count("the keys stay"), log.count("the keys were read again")) == (1, 1)
        # A process that takes the place of a dead one cannot read a broken file, and ends nobody.
        path.write_text("{")
        victim, other = clients
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "cannot serve, and the others go on" in "".join(server.lines))
        assert status(clients[other], "new") == 200
        assert worker_pids(server) == [other]


def test_nobody_outlives_a_killed_supervisor(fake_server: MakeFake) -> None:
    with fake_server("--api-workers", "2") as server:
        pids = [*worker_pids(server), server.core_pid()]
        assert len(pids) == 3
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_in_use_is_one_sentence(workers: RunningServer, fake_model: Path) -> None:
    port = workers.url.rpartition(":")[2]
    flags = ("--model", str(fake_model), "--port", port, "--api-workers", "2")
    done = forked.run("serve", *flags)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
    assert "Traceback" not in done.stderr
