"""Beam searches next to other requests, to pauses and to the end of their engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, QueueFullError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.beams import BeamSearchParams, row_of
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

from tests.waiting import PATIENCE_S, until

PROMPT = "Once upon a time there was a"
BEAMS = 3


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(model="demo", max_num_seqs=2, max_queue=2, max_model_len=256)
    async with await AsyncLLM.start(config, in_process=True) as llm:
        yield llm


async def search(llm: AsyncLLM, max_tokens: int, **more: Any) -> RequestStream:
    params = SamplingParams(n=BEAMS, max_tokens=max_tokens)
    beams = BeamSearchParams(BEAMS, max_tokens, ignore_eos=True)
    options = RequestOptions(client="")
    found = await llm.submit_all([PROMPT], params, options=options, beams=beams, **more)
    return found[0]


async def ids(stream: RequestStream) -> list[list[int]]:
    return [choice.token_ids for choice in (await stream.last()).outputs]


async def under_way(llm: AsyncLLM) -> None:
    await until(lambda: llm.stats.generation_tokens > 10)


async def test_a_search_waits_for_room_in_the_queue(llm: AsyncLLM) -> None:
    """Others may fill it between two steps; a search that was let in is not lost."""
    expected = await ids(await search(llm, 60))
    searching = asyncio.ensure_future(ids(await search(llm, 60)))
    await until(lambda: llm.num_in_flight > 1)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    others: list[RequestStream] = []
    while len(others) < 4 and not searching.done():
        with contextlib.suppress(QueueFullError):
            others.append(await llm.submit("hi", params, kind="final"))
        await asyncio.sleep(0)
    assert len(others) > 1
    assert await searching == expected
    for other in others:
        assert len((await other.last()).outputs[0].token_ids) == 60


async def test_draining_waits_for_a_search(llm: AsyncLLM) -> None:
    expected = await ids(await search(llm, 40))
    stream = await search(llm, 40)
    assert await llm.drain(PATIENCE_S)
    assert llm.num_in_flight == 0
    assert await asyncio.wait_for(ids(stream), 1.0) == expected


async def test_an_abort_ends_a_search_with_an_error(llm: AsyncLLM) -> None:
    stream = await search(llm, 200, request_id="mine")
    waiting = asyncio.ensure_future(ids(stream))
    await under_way(llm)
    assert llm.abort("mine")
    with pytest.raises(EngineDeadError, match="aborted"):
        await waiting
    await until(lambda: llm.num_in_flight == 0)
    step = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")
    with pytest.raises(EngineDeadError, match="aborted"):  # as `pause` ends it
        row_of(
            RequestOutput(
                request_id="", prompt=None, prompt_token_ids=[1], outputs=[step], finished=True
            )
        )


async def test_texts_are_those_of_other_answers(llm: AsyncLLM) -> None:
    """Special tokens stay where they are asked for, and a beam that ends has the usual text."""
    turns = [{"role": "user", "content": "Hi"}]
    for hides in (True, False):
        common = SamplingParams(
            temperature=0.0, max_tokens=30, ignore_eos=True, skip_special_tokens=hides
        )
        plain = await (await llm.submit_chat(turns, common, kind="final")).last()
        beams = BeamSearchParams(1, 30, ignore_eos=True)
        found = await (await llm.submit_chat(turns, common, kind="final", beams=beams)).last()
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        assert found.outputs[0].text == plain.outputs[0].text
        assert ("<|im_end|>" in found.outputs[0].text) == (not hides)
