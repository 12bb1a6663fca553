"""Streams outlive the replica that generates them, with the same ids (CPU backend)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_core.structured import StructuredOutputsParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.wire.outputs import RequestOutput

from tests.waiting import until

BASE = SamplingParams(max_tokens=240, ignore_eos=True, temperature=0.9)
WAYS = {
    "greedy": replace(BASE, temperature=0.0),
    "sampled": replace(BASE, top_p=0.95, top_k=40),
    "penalties": replace(BASE, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.1),
    "logprobs": replace(BASE, logprobs=3),
    "scored": replace(BASE, prompt_logprobs=2),
    "bans": replace(BASE, bad_words=("the", "a b"), logit_bias={5: 2.0}),
    "choices": replace(BASE, n=3),
    "least": replace(BASE, ignore_eos=False, min_tokens=60),
    "stops": replace(BASE, stop=("qqzz",), include_stop_str_in_output=True),
    "grammar": replace(
        BASE, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-z ]{200,400}")
    ),
    "schema": replace(
        BASE,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(
            json={
                "type": "array",
                "items": {"type": "object", "properties": {"name": {"type": "string"}}},
                "minItems": 9,
            }
        ),
    ),
}


def seats(llm: AsyncLLM) -> ReplicaFrontend:
    frontend = llm._frontend
    assert isinstance(frontend, ReplicaFrontend)
    return frontend


def busiest(llm: AsyncLLM) -> ProcessFrontend:
    seat = max(seats(llm)._seats.values(), key=lambda one: len(one.flights))
    assert seat.flights, "nobody works"
    assert isinstance(seat.frontend, ProcessFrontend)
    return seat.frontend


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(model="demo", backend="cpu", replicas=2, num_kv_blocks=256)
    async with await AsyncLLM.start(config) as made:
        yield made


async def answers(llm: AsyncLLM, begun: asyncio.Event | None = None) -> dict[str, Any]:
    """Everything that a client sees of each stream; `begun` is set in the middle of them."""
    counts = dict.fromkeys(WAYS, 0)

    async def one(name: str, params: SamplingParams) -> list[Any]:
        stream = await llm.submit(f"Of {name} and others", replace(params, seed=7), kind="delta")
        parts: list[RequestOutput] = []
        async for output in stream:
            parts.append(output)
            counts[name] += 1
            if begun is not None and min(counts.values()) >= 1:
                begun.set()
        assert parts[-1].error is None, (name, parts[-1].error)
        found: dict[int, list[Any]] = {}
        for part in parts:
            for choice in part.outputs:
                mine = found.setdefault(choice.index, [[], "", [], None])
                mine[0] += choice.token_ids
                mine[1] += choice.text
                for row in choice.logprobs or ():
                    mine[2].append(
                        {key: (round(at.logprob, 6), at.rank) for key, at in row.items()}
                    )
                mine[3] = choice.finish_reason or mine[3]
        scored = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        assert len(scored) == (params.prompt_logprobs is not None)
        whole = [None if row is None else sorted(row) for row in scored[0]] if scored else None
        return [found, whole]

    found = await asyncio.gather(*(one(name, params) for name, params in WAYS.items()))
    return dict(zip(WAYS, found, strict=True))


async def test_a_killed_replica_changes_no_stream(llm: AsyncLLM) -> None:
    wanted = await answers(llm)
    begun = asyncio.Event()
    running = asyncio.ensure_future(answers(llm, begun))
    await begun.wait()
    lost = busiest(llm)
    pid = lost.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: lost.status != "ready")
    assert llm.is_ready
    assert not running.done()
    got = await running
    for name in WAYS:
        assert got[name] == wanted[name], name
    await until(lambda: lost.status == "ready" and lost.pid != pid)
    assert not seats(llm)._dispatch.flights
    assert not seats(llm)._dispatch.router._requests
