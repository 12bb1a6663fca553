"""`--kv-disk` with replicas: each has its own folder, and finds its blocks after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas.digests import PromptDigests
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.wire.messages import CoreRequest

from tests.waiting import until

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [f"{number} ships were counted by the keeper. " * 9 for number in range(16)]


async def answers(llm: AsyncLLM) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids: list[int] = []
        async for output in await llm.submit(prompt, PARAMS, kind="delta"):
            ids += output.outputs[0].token_ids
        found.append(ids)
    return found


def replicas(llm: AsyncLLM) -> ReplicaFrontend:
    assert isinstance(llm._frontend, ReplicaFrontend)
    return llm._frontend


async def test_replicas_find_their_blocks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router knows them by the digests of the cores."""
    made: set[bytes] = set()
    digests_of = PromptDigests.of

    def of(self: PromptDigests, request: CoreRequest) -> list[bytes]:
        found = digests_of(self, request)
        made.update(found[1:])
        return found

    monkeypatch.setattr(PromptDigests, "of", of)
    config = EngineConfig(
        model="demo", backend="cpu", num_kv_blocks=512, replicas=2, kv_disk=str(tmp_path)
    )
    async with await AsyncLLM.start(config) as llm:
        wanted = await answers(llm)
        held = replicas(llm)._dispatch.router._held
        assert len(made) > len(PROMPTS)
        await until(lambda: made <= held[0] | held[1])
    for number in (0, 1):
        assert list((tmp_path / str(number)).glob("*.seg"))
    async with await AsyncLLM.start(config) as llm:
        assert await answers(llm) == wanted
        await until(lambda: replicas(llm).stats.tier_tokens > 0)
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match="others may write there"):
        await AsyncLLM.start(config)
