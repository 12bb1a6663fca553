"""Replicas that come and go with the load lose no stream (CPU backend)."""

from __future__ import annotations

import asyncio

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas import scaling
from vllmx_engine.replicas.frontend import ReplicaFrontend

from tests.waiting import until

CONFIG = EngineConfig(
    model="demo", backend="cpu", num_kv_blocks=256, max_num_seqs=4, replicas=2, min_replicas=1
)


def states(llm: AsyncLLM) -> list[str]:
    assert isinstance(llm._frontend, ReplicaFrontend)
    return [one.state for one in llm._frontend.replicas()]


async def answers(llm: AsyncLLM) -> list[list[int]]:
    async def one(seed: int) -> list[int]:
        params = SamplingParams(max_tokens=128, temperature=0.9, seed=seed, ignore_eos=True)
        ids: list[int] = []
        async for output in await llm.submit(f"number {seed}", params, kind="delta"):
            assert output.error is None, output.error
            ids += output.outputs[0].token_ids
        return ids

    return await asyncio.gather(*(one(seed) for seed in range(24)))


async def test_a_replica_comes_with_the_load_and_goes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "LONG_WAIT_S", 1e-6)
    monkeypatch.setattr(scaling, "GROW_AFTER_S", 0.0)
    async with await AsyncLLM.start(CONFIG) as llm:
        assert states(llm) == ["ready", "spare"]
        wanted = await answers(llm)
        running = asyncio.ensure_future(answers(llm))
        while "spare" in states(llm):
            if running.done():
                running = asyncio.ensure_future(answers(llm))
            await asyncio.sleep(0.01)
        assert await running == wanted
        await until(lambda: states(llm) == ["ready", "ready"])
        assert await answers(llm) == wanted
        monkeypatch.setattr(scaling, "LONG_WAIT_S", 1e6)
        monkeypatch.setattr(scaling, "SHRINK_AFTER_S", 0.0)
        await until(lambda: sorted(states(llm)) == ["ready", "spare"])
        assert await answers(llm) == wanted
