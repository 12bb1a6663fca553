"""Replicas on a Ray cluster of two raylets."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, ModelNotFoundError
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas import scaling
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.replicas.seats import Seat

from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'vllmx[ray]'"),
]
LIMITS: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "bfloat16",
    "num_threads": 1,
    "max_num_seqs": 8,
    "num_kv_blocks": 128,
    "max_model_len": 512,
}
PROMPTS = ["Once upon a time", "The capital of France", "A cat sat", "In the year 1905 a man"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=300, ignore_eos=True),
]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
CORE = "vllmx_ray.core_process"


class RayCluster:
    """The process of `cluster.py`."""

    def __init__(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (words := self._started()):
            assert time.monotonic() < deadline, "Ray does not start here"
        self.address = words[0]
        self.head, self.second, self.server = map(int, words[1:])

    def _started(self) -> list[str]:
        """The words of the script; none if Ray gave up, which does not wait for a busy machine."""
        script = Path(__file__).with_name("cluster.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if len(words := line.split()) == 4 and ":" in words[0]:
                return words
        self.close()
        return []

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def add(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def cores(self) -> list[psutil.Process]:
        """The hosts of cores. Each is a child of its actor."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if CORE in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue  # it has ended
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    found = RayCluster()
    yield found
    found.close()


def config(address: str) -> EngineConfig:
    return EngineConfig(model="demo", ray_address=address, replicas=2, **LIMITS)


async def streamed(llm: AsyncLLM, request: tuple[str, SamplingParams], seen: list[int]) -> None:
    async for output in await llm.submit(*request):
        seen.extend(output.outputs[0].token_ids)


async def _paused(
    llm: AsyncLLM, seats: dict[int, Seat]
) -> tuple[list[list[int]], list[asyncio.Task[None]]]:
    """Answers so far and their streams, while each of both replicas has some that are not done."""
    while True:
        await until(lambda: all(seat.serves for seat in seats.values()))
        answers: list[list[int]] = [[] for _ in REQUESTS]
        streams = [
            asyncio.ensure_future(streamed(llm, request, answer))
            for request, answer in zip(REQUESTS, answers, strict=True)
        ]
        await until(lambda answers=answers: all(answers))  # type: ignore[misc]
        await llm.pause("keep")
        if all(seat.flights for seat in seats.values()):
            return answers, streams
        await llm.resume()  # they were done sooner than this process had its turn
        await asyncio.gather(*streams)


async def test_lost_actors_and_raylets_lose_no_stream(
    cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    from vllmx_ray.placing import placed

    llm = await asyncio.to_thread(lambda: LLM("demo", **LIMITS))
    wanted = [list(llm.generate(*one)[0].outputs[0].token_ids) for one in REQUESTS]
    with placed(config(cluster.address)) as found:
        async with await AsyncLLM.start(found) as replicas:
            assert isinstance(replicas._frontend, ReplicaFrontend)
            seats = replicas._frontend._seats
            assert len(cluster.cores()) == 2
            for kill in (_kill_driver, _kill_actor, _kill_raylet):
                answers, streams = await _paused(replicas, seats)
                kill(cluster)
                if kill is not _kill_driver:
                    await until(lambda: "go on elsewhere" in caplog.text)
                    caplog.clear()
                await replicas.resume()
                await asyncio.gather(*streams)
                assert answers == wanted
            cluster.add()
            await until(lambda: all(seat.serves for seat in seats.values()))
    assert not cluster.cores()


async def test_replicas_come_and_go_with_the_load(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllmx_ray.placing import placed

    monkeypatch.setattr(scaling, "LONG_WAIT_S", 1e6)
    monkeypatch.setattr(scaling, "GROW_AFTER_S", 0.0)
    with placed(replace(config(cluster.address), min_replicas=1)) as found:
        async with await AsyncLLM.start(found) as llm:
            assert isinstance(llm._frontend, ReplicaFrontend)
            seats = llm._frontend._seats
            assert [seat.state().state for seat in seats.values()] == ["ready", "spare"]
            assert len(cluster.cores()) == 1
            answers: list[list[list[int]]] = []
            for _ in range(2):
                monkeypatch.setattr(scaling, "LONG_WAIT_S", 0.0)
                await until(lambda: all(seat.serves for seat in seats.values()))
                assert len(cluster.cores()) == 2
                monkeypatch.setattr(scaling, "LONG_WAIT_S", 1e6)
                streams: list[list[int]] = [[] for _ in REQUESTS]
                both = zip(REQUESTS, streams, strict=True)
                running = [asyncio.ensure_future(streamed(llm, *one)) for one in both]
                monkeypatch.setattr(scaling, "SHRINK_AFTER_S", 0.0)
                await asyncio.gather(*running)
                answers.append(streams)
                await until(lambda: any(seat.is_spare for seat in seats.values()))
                await until(lambda: len(cluster.cores()) == 1)
                monkeypatch.setattr(scaling, "SHRINK_AFTER_S", 1e6)
            assert answers[0] == answers[1]
    assert not cluster.cores()


async def test_prompts_are_computed_apart(cluster: RayCluster) -> None:
    from vllmx_ray.placing import placed

    apart = replace(config(cluster.address), prefill_replicas=1, remote_prefill_tokens=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with placed(apart) as found:
        async with await AsyncLLM.start(found) as llm:
            assert isinstance(llm._frontend, ReplicaFrontend)
            assert [one.role for one in llm._frontend.replicas()] == ["prefill", "decode"]
            number = 0
            while not llm._frontend.stats.peer_tokens:
                texts = [f"{number + one}: " + PROMPTS[3] * 9 for one in range(8)]
                number += 8
                await asyncio.gather(*(streamed(llm, (text, greedy), []) for text in texts))
                await asyncio.sleep(0.6)  # until the counters come
            assert llm._frontend.stats.num_peer_failures == 0


def _kill_driver(cluster: RayCluster) -> None:
    """It is started again, and finds the replicas."""
    for child in psutil.Process().children():
        if "vllmx_ray.driver" in child.cmdline():
            child.kill()


def _kill_actor(cluster: RayCluster) -> None:
    _kill_all(cluster.cores()[0].ppid())


def _kill_raylet(cluster: RayCluster) -> None:
    _kill_all(cluster.second)


def _kill_all(pid: int) -> None:
    """At once: processes that only lose their parent may finish what they do."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        each.kill()


def test_what_cannot_be_placed(cluster: RayCluster) -> None:
    from vllmx_ray.placing import placed

    large = config(cluster.address)
    with (
        pytest.raises(ConfigError, match=r"needs 64 CPU on one node, .* at most 1 CPU: add a node"),
        placed(replace(large, num_threads=64)),
    ):
        pass
    with (
        pytest.raises(ModelNotFoundError, match="/nowhere"),
        placed(replace(large, model="/nowhere")),
    ):
        pass


async def test_a_lost_head_loses_no_stream(cluster: RayCluster) -> None:
    """The last test of the cluster: Ray ends it. What runs elsewhere goes on until then."""
    from vllmx_ray.placing import placed

    with placed(config(cluster.address)) as found:
        async with await AsyncLLM.start(found) as llm:
            assert isinstance(llm._frontend, ReplicaFrontend)
            seats = llm._frontend._seats
            wanted = [[] for _ in REQUESTS]  # type: list[list[int]]
            both = zip(REQUESTS, wanted, strict=True)
            await asyncio.gather(*(streamed(llm, *one) for one in both))
            answers, streams = await _paused(llm, seats)
            _kill_all(cluster.server)
            _kill_all(cluster.head)
            await until(lambda: sum(seat.serves for seat in seats.values()) <= 1)
            await llm.resume()
            await asyncio.gather(*streams)
            assert answers == wanted


def test_a_cluster_that_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "vllmx", "serve", "demo", "--ray-address", address],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert f"Ray cannot be reached at {address}" in done.stderr
    assert "start it with `ray start --head`" in done.stderr
