"""`vllmx serve --replica-hosts` over the cores of two `vllmx core`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import forked
from tests.waiting import wait_until

from .conftest import running_server

LIMITS = (
    "demo", "--backend", "cpu", "--num-threads", "1", "--num-kv-blocks", "64",
    "--max-model-len", "256", "--max-num-seqs", "4",
)  # fmt: skip
SCALED = ("serve", "demo", "--max-replicas", "2", "--min-replicas", "1", "--api-workers", "2")
ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(b"k" * 40)
    return str(file)


@contextmanager
def core_host(key_file: str, *flags: str) -> Iterator[tuple[str, forked.Forked]]:
    """`vllmx core` on a free port: where it listens, and its process."""
    flags = ("--listen", "127.0.0.1:0", "--rank-key-file", key_file, *flags)
    process, errors = forked.watched("core", *LIMITS, *flags)
    with errors:
        try:
            for line in errors:
                if found := re.search(r"ready at (\S+)", line):
                    yield found[1], process
                    return
            raise AssertionError("the host of the core ended")
        finally:
            process.kill()


def test_a_server_over_cores_of_other_hosts(key_file: str) -> None:
    """Both API processes reach them; one that is stopped is missed by nobody."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(core_host(key_file)) for _ in range(2)]
        flags = ("--replica-hosts", ",".join(address for address, _ in hosts))
        flags += ("--rank-key-file", key_file, "--api-workers", "2", "--admin-key", "boss")
        server = stack.enter_context(running_server("demo", *flags))
        texts = {server.post("/v1/completions", ASKED).json()["choices"][0]["text"]}
        assert server.metric("num_requests_running") == 0
        admin = {"authorization": "Bearer boss"}
        for route, states in (("drain", {"draining", "ready"}), ("add", {"ready"})):
            done = server.post(f"/replicas/{route}", {"replica": 0}, headers=admin)
            assert done.status_code == 200, done.text
            for _ in range(4):  # of whichever API process
                found = server.get("/replicas", headers=admin).json()["replicas"]
                assert {one["state"] for one in found} == states
        _, stopped = hosts[0]
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait() == 0
        for _ in range(4):  # of whichever API process
            answer = server.post("/v1/completions", ASKED)
            texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        _, other = hosts[1]
        other.kill()
        other.wait()
        wait_until(lambda: server.get("/health").status_code == 503)


def test_a_prompt_is_computed_on_one_host_and_continued_on_another(key_file: str) -> None:
    def text(seed: int) -> str:
        prompt = f"Number {seed}: " + "once upon a time there was a ship in the harbour, " * 8
        body = ASKED | {"prompt": prompt, "temperature": 1, "seed": seed, "cache_salt": f"{seed}"}
        return str(server.post("/v1/completions", body).json()["choices"])

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(12))
        decoder, _ = stack.enter_context(core_host(key_file, "--role", "decode"))
        prefiller, process = stack.enter_context(core_host(key_file, "--role", "prefill"))
        flags = ("--replica-hosts", f"{decoder},{prefiller}", "--rank-key-file", key_file)
        flags += ("--admin-key", "boss", "--remote-prefill-tokens", "32")
        server = stack.enter_context(running_server("demo", *flags))
        states = server.get("/replicas", headers={"authorization": "Bearer boss"}).json()
        assert [one["role"] for one in states["replicas"]] == ["decode", "prefill"]
        seeds = range(12)
        while not server.metric("kv_peer_tokens_total"):
            wanted = list(pool.map(text, seeds))
            seeds = range(seeds.stop, seeds.stop + 12)
        assert server.metric("kv_peer_failures_total") == 0
        process.send_signal(signal.SIGTERM)
        process.wait()
        assert list(pool.map(text, range(seeds.start - 12, seeds.start))) == wanted


def test_replicas_of_something_else_are_refused_by_name(key_file: str) -> None:
    with ExitStack() as stack:
        roles = (("--role", "prefill"), ("--role", "decode", "--dtype", "float32"))
        hosts = [stack.enter_context(core_host(key_file, *role))[0] for role in roles]
        flags = ("--rank-key-file", key_file, "--replica-hosts", ",".join(hosts), "--port", "0")
        done = forked.run("serve", "demo", *flags)
        assert done.returncode == 2
        text = r"replica 1 keeps KV blocks of \w+ in f32 .*, and replica 0 of .*: start both"
        assert re.search(text, done.stderr), done.stderr


def test_flags_that_cannot_be(key_file: str) -> None:
    for arguments, text in (
        (("serve", "demo", "--replica-hosts", "a:1"), "replicas on other hosts need --rank-key"),
        (("serve", "demo", "--replica-hosts", "a"), "is not a host:port"),
        (("core", "demo"), "clients on other hosts need --rank-key-file"),
        (("core", "demo", "--listen", "a:1,b:2"), "names 2 addresses: give one"),
        (SCALED, "--min-replicas needs one API process and one model: leave --api-workers out"),
        (("serve", "demo", "--role", "decode"), "--role decode is a replica's: give it to `vllmx"),
        (
            ("serve", "demo", "--prefill-replicas", "1"),
            "leaves none that generates: set --replicas",
        ),
    ):
        key = () if "need" in text else ("--rank-key-file", key_file)
        done = forked.run(*arguments, *key)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr
