"""The parts of the comparison of servers that can be wrong without anybody noticing."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx.bench.serving import Load
from vllmx.bench.sse_client import Streamed

from tests.bench_scripts import bench_modules


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with bench_modules(monkeypatch) as load:
        yield load


def test_a_peer_serves_once_it_says_so(bench: Any) -> None:
    servers = bench("cpu_peers.servers")
    bound = "srv  start: binding port with default address family\n"
    assert servers.llama_url(bound) is None
    said = "0.01.226 I srv  llama_server: listening on http://127.0.0.1:34567\n"
    assert servers.llama_url(bound + said) == "http://127.0.0.1:34567"
    starting = "Starting vLLM server on http://127.0.0.1:81\nINFO: Waiting for startup.\n"
    assert servers.vllm_url(starting, 81) is None
    up = starting + "INFO:     Application startup complete.\n"
    assert servers.vllm_url(up, 81) == "http://127.0.0.1:81"


def test_a_peer_that_is_missing_says_how_it_is_had(bench: Any, tmp_path: Path) -> None:
    servers, weights = bench("cpu_peers.servers"), bench("cpu_peers.weights")
    model = weights.Weights("bf16", tmp_path, tmp_path / "bf16.gguf")
    room = servers.Room(8, 256, 2)
    for peer, option in [("llama.cpp", "--setup-llama"), ("vllm", "--setup-vllm")]:
        with pytest.raises(FileNotFoundError, match=option):
            servers.start_of(peer, tmp_path, model, room, [])


def test_peers_hold_as_much_and_compute_with_as_many_threads(bench: Any, tmp_path: Path) -> None:
    servers, weights = bench("cpu_peers.servers"), bench("cpu_peers.weights")
    for path in ("llama.cpp/build/bin/llama-server", "vllm-cpu/bin/python", "model.safetensors"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "bf16.gguf").touch()
    model = weights.Weights("bf16", tmp_path, tmp_path / "bf16.gguf")
    room = servers.Room(sequences=8, tokens=256, threads=2)
    llama = servers.start_of("llama.cpp", tmp_path, model, room, ["--mlock"])
    options = dict(zip(llama.command[1::2], llama.command[2::2], strict=False))
    assert options["-m"] == str(model.gguf)
    assert " -np 8 -c 2048 -t 2 -tb 2 " in f"{' '.join(llama.command)} "
    assert llama.command[-1] == "--mlock"
    vllm = servers.start_of("vllm", tmp_path, model, room, [])
    assert "--max-num-seqs 8 --max-model-len 256" in " ".join(vllm.command)
    assert vllm.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_servers_get_the_same_requests_in_turn(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poisson, served = bench("poisson"), bench("served")
    sent: list[tuple[str, float, int, int]] = []

    def send(server: Any, load: Load, rate: float, count: int, seed: int, into: Any) -> None:
        sent.append((server.name, rate, count, seed))
        into.seconds += 1

    monkeypatch.setattr(poisson, "_send", send)
    started = [served.Server(name, "http://there", 1) for name in ("vllmx", "other")]
    options = argparse.Namespace(rates=[2.0, 8.0], rounds=2, requests=5)
    taken = poisson.in_turn(started, Load("", "m", 10, 4, 4, 1), options)
    assert sent[2:6] == [
        ("vllmx", 2.0, 5, 1),
        ("other", 2.0, 5, 1),
        ("vllmx", 8.0, 5, 1),
        ("other", 8.0, 5, 1),
    ]
    assert {seed for *_, seed in sent[6:]} == {2}
    assert {key: each.seconds for key, each in taken.items()} == dict.fromkeys(taken, 2.0)
    assert len(taken) == 4


def test_figures_are_those_of_all_rounds(bench: Any) -> None:
    poisson = bench("poisson")
    results = [Streamed(0.0, [first, first + 0.01, first + 0.03], 3) for first in (0.1, 0.2, 0.3)]
    taken = poisson.Taken([*results, Streamed(0.0, error="gone")], 3.0, 90e-6, 900e-6)
    figures = taken.figures()
    assert (figures["requests"], figures["failed"], figures["tokens_per_s"]) == (4, 1, 3.0)
    assert (figures["first_p50_ms"], figures["gap_p50_ms"]) == (200.0, 15.0)
    assert (figures["api_us"], figures["all_us"], figures["events_per_token"]) == (10, 100, 1)


def test_ratios_are_theirs_to_ours_at_the_same_rate(bench: Any) -> None:
    poisson = bench("poisson")
    table = [
        {"server": name, "rate": rate, **dict.fromkeys(poisson._FIGURES, value * rate)}
        for name, value in (("vllmx", 2.0), ("vllm", 6.0))
        for rate in (1.0, 4.0)
    ]
    found = poisson.ratios(table)
    assert [(each["peer / vllmx"], each["rate"]) for each in found] == [
        ("vllm", 1.0),
        ("vllm", 4.0),
    ]
    assert {each[name] for each in found for name in poisson._FIGURES} == {3.0}


_PARENT = """
import subprocess, sys
work = "sum(range(3_000_000)); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="CPU time is read as Linux has it")
def test_cpu_time_of_a_server_is_its_own_and_that_of_all_behind_it(bench: Any) -> None:
    served = bench("served")
    began_s = time.process_time()
    ours = served._cpu_s(os.getpid())
    assert began_s <= ours <= time.process_time()
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child has done its sum
        server = served.Server("any", "http://there", parent.pid)
        alone_s, whole_s = server.cpu_s(), server.whole_cpu_s()
        parent.communicate(b"\n")
    assert whole_s > alone_s > 0


def test_agents_read_ids_and_cached_tokens_of_all_servers(bench: Any) -> None:
    taken = bench("agents").taken
    assert taken({"choices": [{"token_ids": [3, 4]}], "usage": None}) == ([3, 4], 0)
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    assert taken({"choices": [], "usage": usage}) == ([], 16)
    assert taken({"choices": [], "usage": {"prompt_tokens_details": None}}) == ([], 0)
    assert taken({"tokens": [5], "stop": False}) == ([5], 0)
    assert taken({"tokens": [], "stop": True, "timings": {"cache_n": 7}}) == ([], 7)


def test_agents_give_every_server_the_same_room(bench: Any, tmp_path: Path) -> None:
    agents, weights = bench("agents"), bench("cpu_peers.weights")
    for path in ("llama.cpp/build/bin/llama-server", "vllm-cpu/bin/python", "model.safetensors"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "bf16.gguf").touch()
    options = argparse.Namespace(
        system=48, turns=2, result=32, answer=16, share=0.5, sessions=16,
        peers=["llama.cpp", "vllm"], peers_dir=tmp_path, only=[],
    )  # fmt: skip
    model = weights.Weights("bf16", tmp_path, tmp_path / "bf16.gguf")
    cases = agents.cases_of(options, model, "disk")
    words = [" ".join(case.start.command) for case in cases]
    # 160 tokens a session, half of 16 of them: 1280 tokens
    assert [case.name for case in cases][3:] == ["llama.cpp", "llama.cpp with host memory", "vllm"]
    assert all("--num-gpu-blocks-override 80 " in each for each in words[:3])
    assert all(" -np 5 -c 1280 " in each for each in words[3:5])
    assert "--block-size 32 --num-gpu-blocks-override 41" in words[5]
