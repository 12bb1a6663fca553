"""`vllmx serve --replicas`: two replicas behind two API processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest
from click.testing import CliRunner
from vllmx.cli.replicas import replicas
from vllmx_core.errors import ConfigError
from vllmx_testing.fake_checkpoint import make_fake_checkpoint

from tests.waiting import PATIENCE_S, wait_until

from .conftest import PLAIN, MakeFake, RunningServer, running_server

ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def server(fake_server: MakeFake) -> Iterator[RunningServer]:
    flags = ("--replicas", "2", "--num-threads", "2", "--api-workers", "2", "--admin-key", "boss")
    with fake_server(*flags) as made:
        yield made


def cores(server: RunningServer) -> list[int]:
    return server.child_pids("vllmx_engine.link.process")


def states(server: RunningServer) -> list[str]:
    found = server.get("/replicas", headers=ADMIN).json()["replicas"]
    return [one["state"] for one in found]


def texts(server: RunningServer, begun: Event | None = None) -> list[str]:
    """Eight seeded streams at once; `begun` is set once all have some text."""
    count = 0

    def one(seed: int) -> str:
        nonlocal count
        body = {"prompt": f"number {seed}", "max_tokens": 300, "stream": True, "seed": seed}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, **PLAIN) as answer:
            lines: list[str] = []
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 40:
                    count += 1
                    if count == 8 and begun is not None:
                        begun.set()
        parts = [line for line in lines if line.startswith("data: {")]
        assert lines[-2] == "data: [DONE]", lines[-5:]
        return "".join(part.split('"text":"')[1].split('","')[0] for part in parts)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(8)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_replica(server: RunningServer, number: signal.Signals) -> None:
    wait_until(lambda: states(server) == ["ready", "ready"])
    wanted = texts(server)
    assert len(set(wanted)) == 8
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(texts, server, begun)
        assert begun.wait(PATIENCE_S)
        pid = cores(server)[0]
        os.kill(pid, number)
        try:
            assert running.result(PATIENCE_S) == wanted
            assert server.get("/health").status_code == 200
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    wait_until(lambda: states(server) == ["ready", "ready"])


def command(server: RunningServer, *words: str) -> str:
    words = (*words, "--url", server.url, "--api-key", "boss")
    return CliRunner().invoke(replicas, words, catch_exceptions=False).output


def test_a_replica_is_drained_and_added(server: RunningServer) -> None:
    wait_until(lambda: states(server) == ["ready", "ready"])
    wanted = texts(server)
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(texts, server, begun)
        assert begun.wait(PATIENCE_S)
        assert "drained" in command(server, "drain", "0")
        assert running.result(PATIENCE_S) == wanted
    wait_until(lambda: len(cores(server)) == 1)
    with pytest.raises(ConfigError, match="replica 1 is the last one that serves"):
        command(server, "drain", "1")
    with pytest.raises(ConfigError, match="no replica 7: choose one from 0 to 1"):
        command(server, "drain", "7")
    assert texts(server) == wanted
    command(server, "add", "0")
    wait_until(lambda: states(server) == ["ready", "ready"])
    assert len(cores(server)) == 2
    wait_until(lambda: command(server, "list").count("ready") == 2)  # also of the other worker


def test_workers_have_prompts_computed_apart() -> None:
    """Other cores reach the one that computes prompts by the socket that workers use."""
    flags = ("--replicas", "2", "--prefill-replicas", "1", "--remote-prefill-tokens", "32")
    flags += ("--num-threads", "2", "--api-workers", "2", "--admin-key", "boss")
    with running_server("demo", "--backend", "cpu", "--num-kv-blocks", "512", *flags) as made:

        def text(seed: int) -> str:
            prompt = f"Number {seed}: " + "a ship in the harbour, " * 12
            body = {"prompt": prompt, "max_tokens": 24, "seed": seed}
            return str(made.post("/v1/completions", body).json()["choices"])

        assert "prefill" in command(made, "list")
        seeds = range(12)
        with ThreadPoolExecutor(12) as pool:
            while not made.metric("kv_peer_tokens_total"):
                wanted = list(pool.map(text, seeds))
                last, seeds = seeds, range(seeds.stop, seeds.stop + 12)
            assert made.metric("kv_peer_failures_total") == 0
            assert list(pool.map(text, last)) == wanted


def test_operators_calls_reach_all_replicas(server: RunningServer) -> None:
    wait_until(lambda: states(server) == ["ready", "ready"])
    text = server.get("/metrics").text
    assert 'num_requests_running{model_name="fake",replica="1"}' in text
    assert server.get("/replicas").status_code == 401
    texts(server)
    server.becomes_idle()
    assert server.post("/reset_prefix_cache", headers=ADMIN).json()["reset"] == {"fake": True}
    assert server.post("/sleep?mode=abort", headers=ADMIN).status_code == 200
    wait_until(lambda: states(server) == ["asleep", "asleep"] and not cores(server))
    assert server.get("/health").status_code == 503
    assert server.post("/wake", headers=ADMIN).status_code == 200
    wait_until(lambda: states(server) == ["ready", "ready"])
    assert len(set(texts(server))) == 8


def test_each_of_several_models_has_replicas(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    for name in ("one", "two"):
        make_fake_checkpoint(tmp_path / name, vocab_size=128, eos_id=None)
    models = [f"--model={name}={tmp_path / name}" for name in ("one", "two")]
    flags = ("--backend=fake", *models, "--replicas=2", "--num-threads=2")
    with running_server(*flags, environment=fake_environment) as made:

        def answers() -> list[str]:
            asked = {"prompt": "ab", "max_tokens": 5, "temperature": 0}
            bodies = [asked | {"model": name} for name in ("one", "two")]
            found = [made.post("/v1/completions", body) for body in bodies]
            assert [one.json()["model"] for one in found] == ["one", "two"]
            return [one.json()["choices"][0]["text"] for one in found]

        wanted = answers()
        text = made.get("/metrics").text
        for name in ("one", "two"):
            assert f'num_requests_running{{model_name="{name}",replica="1"}}' in text
        assert len(cores(made)) == 4
        os.kill(cores(made)[0], signal.SIGKILL)
        assert answers() == wanted
