"""Prompts that another replica computes change no stream (CPU backend)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.replicas.frontend import ReplicaFrontend

from tests.waiting import until

WORDS = ("quiet", "harbour", "ships", "counted", "seven", "of", "the", "and")
BASE = {"backend": "cpu", "num_kv_blocks": 2048, "max_num_seqs": 32}
APART = {"replicas": 3, "prefill_replicas": 1, "remote_prefill_tokens": 48, "num_threads": 3}


def mixed(name: str) -> list[tuple[str, SamplingParams]]:
    """64 seeded requests, short and long. Some share a prefix."""
    rng = random.Random(name)
    found = []
    for seed in range(64):
        count = rng.choice((4, 40, 90, 140))
        prompt = f"{name} {seed % 48} " + " ".join(rng.choice(WORDS) for _ in range(count))
        params = SamplingParams(
            max_tokens=rng.randint(8, 40),
            temperature=rng.choice((0.0, 0.8)),
            frequency_penalty=rng.choice((0.0, 0.4)),
            logprobs=rng.choice((None, 2)),
            n=rng.choice((1, 1, 2)),
            seed=seed,
            ignore_eos=True,
        )
        found.append((prompt, params))
    return found


async def answers(llm: AsyncLLM, name: str) -> list[object]:
    """All ids and log-probabilities."""

    async def one(prompt: str, params: SamplingParams) -> object:
        found: dict[int, tuple[list[object], list[object]]] = {}
        async for output in await llm.submit(prompt, params, kind="delta"):
            assert output.error is None, output.error
            for choice in output.outputs:
                ids, rows = found.setdefault(choice.index, ([], []))
                ids += choice.token_ids
                for row in choice.logprobs or ():
                    rows.append({key: (round(at.logprob, 6), at.rank) for key, at in row.items()})
        return found

    return await asyncio.gather(*(one(prompt, params) for prompt, params in mixed(name)))


def replicas(llm: AsyncLLM) -> ReplicaFrontend:
    assert isinstance(llm._frontend, ReplicaFrontend)
    return llm._frontend


@pytest.fixture(params=["attention", "recurrent"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The demo model, or one with recurrent layers."""
    if request.param == "attention":
        return "demo"
    pytest.importorskip("transformers")
    from ...backend.test_recurrent_architectures import TestLfm2  # noqa: TID252 - as its users do

    config = TestLfm2.config | {"vocab_size": 4096, "max_position_embeddings": 512}
    type("Twin", (TestLfm2,), {"config": config})().transformers_model().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, tmp_path)
    return str(tmp_path)


async def test_64_streams_are_those_of_one_core(model: str) -> None:
    config: dict[str, Any] = BASE | {"model": model}
    async with await AsyncLLM.start(EngineConfig(**config)) as llm:
        wanted = {name: await answers(llm, name) for name in ("first", "second")}
    async with await AsyncLLM.start(EngineConfig(**config | APART)) as llm:
        await answers(llm, "warm")  # costs are known from here on
        assert await answers(llm, "first") == wanted["first"]
        await until(lambda: replicas(llm).stats.peer_tokens > 0)
        assert replicas(llm).stats.num_peer_failures == 0
        seat = replicas(llm)._seats[0]
        prefiller = seat.frontend
        assert isinstance(prefiller, ProcessFrontend)
        pid = prefiller.pid
        while True:
            running = asyncio.ensure_future(answers(llm, "second"))
            await until(lambda task=running: bool(seat.flights) or task.done())  # type: ignore[misc]
            if seat.flights:
                break
            await llm.reset_prefix_cache()  # each decoder had room for all of them
        os.kill(pid, signal.SIGKILL)
        assert await running == wanted["second"]
        await until(lambda: prefiller.status == "ready" and prefiller.pid != pid)
        assert await answers(llm, "first") == wanted["first"]
        assert not replicas(llm)._dispatch.flights
        assert not replicas(llm)._dispatch.router._requests


async def test_a_replica_that_starts_again_with_other_files_has_other_blocks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_FOLDER, folder)
    config: dict[str, Any] = BASE | APART | {"model": str(folder), "replicas": 2}
    async with await AsyncLLM.start(EngineConfig(**config)) as llm:
        first, second = (seat.frontend for seat in replicas(llm)._seats.values())
        assert first.info.blocks_of == second.info.blocks_of
        assert isinstance(first, ProcessFrontend)
        os.utime(next(folder.glob("*.safetensors")), (1, 1))
        pid = first.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: first.status == "ready" and first.pid != pid)
        assert first.info.blocks_of != second.info.blocks_of
