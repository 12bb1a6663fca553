"""AsyncLLM, with the core on a thread and in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import (
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueFullError,
    TemplateError,
)
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.chat import ChatOptions, Message
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.llm import LLM
from vllmx_engine.wire.outputs import RequestOutput

from tests.waiting import PATIENCE_S, until

MakeEngine = Callable[..., AbstractAsyncContextManager[AsyncLLM]]

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

both = pytest.mark.parametrize("in_process", [True, False], ids=["thread", "process"])


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
    """A streamed answer, put together."""
    text, ids = "", []
    async for output in llm.generate(prompt, params):
        text += output.outputs[0].text
        ids += output.outputs[0].token_ids
    return text, ids


async def idle(llm: AsyncLLM, *, generated: int = 1) -> None:
    """Waits for the core to report that so many tokens are generated, nothing runs and every block
    is free."""

    def is_idle() -> bool:
        stats = llm.stats
        nobody = stats.num_blocks > 0 and stats.num_running == 0 and stats.num_waiting == 0
        return nobody and stats.generation_tokens >= generated

    await until(is_idle)
    assert llm.stats.num_free_blocks == llm.stats.num_blocks


@both
async def test_concurrent_streams_equal_llm_one_at_a_time(
    make_engine: MakeEngine, folder: str, registry: Registry, in_process: bool
) -> None:
    prompts = [f"prompt {i} " + "x" * (i * 3) for i in range(64)]
    params = [
        SamplingParams(max_tokens=5 + i % 17, seed=i, temperature=0.7 * (i % 2), ignore_eos=True)
        for i in range(64)
    ]
    with LLM(folder, registry=registry, backend="fake", max_num_seqs=1) as alone:
        wanted = [
            alone.generate(prompt, own)[0].outputs[0]
            for prompt, own in zip(prompts, params, strict=True)
        ]
    async with make_engine(in_process=in_process, num_kv_blocks=160) as llm:
        answers = await asyncio.gather(
            *[collect(llm, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        )
        await idle(llm, generated=sum(own.max_tokens or 0 for own in params))
    assert answers == [(choice.text, choice.token_ids) for choice in wanted]


async def test_the_format_is_looked_for_at_start(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllmx.formats"):
        async with make_engine(in_process=True):
            said = [record.message for record in caplog.records if record.name == "vllmx.formats"]
    assert len(said) == 1
    assert said[0].startswith("calls of tools: ")


@both
async def test_kinds_agree(make_engine: MakeEngine, in_process: bool) -> None:
    async with make_engine(in_process=in_process) as llm:
        outputs: dict[str, list[RequestOutput]] = {}
        for kind in ("delta", "cumulative", "final"):
            stream = llm.generate("hi", GREEDY, kind=kind)
            outputs[kind] = [output async for output in stream]
    whole = outputs["final"][0].outputs[0]
    assert len(outputs["final"]) == 1
    assert outputs["cumulative"][-1].outputs[0] == whole
    assert "".join(output.outputs[0].text for output in outputs["delta"]) == whole.text
    streamed = [token for output in outputs["delta"] for token in output.outputs[0].token_ids]
    assert streamed == whole.token_ids
    assert [output.finished for output in outputs["delta"]].count(True) == 1


@both
@pytest.mark.parametrize("stop", [(), ("zz",)], ids=str)
async def test_what_nobody_looks_at_before_its_end_is_the_same(
    make_engine: MakeEngine, in_process: bool, stop: tuple[str, ...]
) -> None:
    params = dataclasses.replace(GREEDY, stop=stop)
    async with make_engine(in_process=in_process) as llm:
        wanted = await collect(llm, "hi", params)
        options = RequestOptions(at_end=True)
        (stream,) = await llm.submit_all(["hi"], params, kind="delta", options=options)
        outputs = [output.outputs[0] async for output in stream]
    assert "".join(output.text for output in outputs) == wanted[0]
    assert [token for output in outputs for token in output.token_ids] == wanted[1]
    assert stop or len(outputs) == 1


@both
async def test_logprobs_cross_the_boundary(make_engine: MakeEngine, in_process: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    async with make_engine(in_process=in_process) as llm:
        output = await (await llm.submit("hello", params, kind="final")).last()
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    assert [next(iter(entry.values())).rank for entry in choice.logprobs] == [1] * 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == list(b"ello")


@both
async def test_stop_string_ends_the_core_s_work_too(
    make_engine: MakeEngine, slow_folder: str, in_process: bool
) -> None:
    async with make_engine(in_process=in_process, model=slow_folder) as llm:
        text, _ = await collect(llm, "hi", GREEDY)
        stop = text[5:8]
        params = SamplingParams(temperature=0.0, max_tokens=500, stop=(stop,), ignore_eos=True)
        outputs = [output async for output in llm.generate("hi", params)]
        assert "".join(output.outputs[0].text for output in outputs) == text[: text.index(stop)]
        assert outputs[-1].outputs[0].stop_reason == stop
        await idle(llm)
        assert llm.stats.generation_tokens < 400


@both
async def test_prefix_cache_and_its_reset(make_engine: MakeEngine, in_process: bool) -> None:
    async with make_engine(in_process=in_process) as llm:
        cached = []
        for salt in ("a", "a", "b"):
            stream = await llm.submit("x" * 100, GREEDY, cache_salt=salt, kind="final")
            cached.append((await stream.last()).num_cached_tokens)
        assert cached[0] == cached[2] == 0
        assert cached[1] >= 80
        assert await llm.reset_prefix_cache()
        stream = await llm.submit("x" * 100, GREEDY, cache_salt="a", kind="final")
        assert (await stream.last()).num_cached_tokens == 0


@both
async def test_a_reset_that_nobody_waits_for_any_more_does_no_harm(
    make_engine: MakeEngine, in_process: bool
) -> None:
    async with make_engine(in_process=in_process) as llm:
        before = await collect(llm, "hi", GREEDY)
        waiting = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        waiting.cancel()
        # Answered after the first one; False while the step after the answer's last is under way.
        async with asyncio.timeout(PATIENCE_S):
            while not await llm.reset_prefix_cache():
                await asyncio.sleep(0.01)
        assert llm.is_ready
        assert await collect(llm, "hi", GREEDY) == before


async def test_several_choices_stream_side_by_side(make_engine: MakeEngine) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=15, ignore_eos=True)
    async with make_engine() as llm:
        texts = ["", "", ""]
        ids: list[list[int]] = [[], [], []]
        async for output in llm.generate("hi", params):
            for choice in output.outputs:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
        final = await (await llm.submit("hi", params, kind="final")).last()
    assert [choice.text for choice in final.outputs] == texts
    assert [choice.token_ids for choice in final.outputs] == ids


async def test_a_slow_consumer_gets_merged_news_and_holds_up_nobody(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as llm:
        slow = await llm.submit("slow", GREEDY)
        fast = await collect(llm, "fast", GREEDY)
        await until(lambda: not llm.num_in_flight)
        outputs = [output async for output in slow]
        assert len(outputs) == 1
        assert len(outputs[0].outputs[0].token_ids) == len(fast[1]) == 20


# --- aborts ---------------------------------------------------------------------------------------
@both
async def test_abort_in_every_phase(
    make_engine: MakeEngine, make_folder: Callable[..., str], in_process: bool
) -> None:
    """Waiting behind others, while the prompt is computed, while decoding, after the end."""
    few: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    folder = make_folder("slow", step_s=0.01, max_model_len=10_000)
    endless = SamplingParams(temperature=0.0, max_tokens=9000, ignore_eos=True)
    async with make_engine(in_process=in_process, model=folder, **few) as llm:
        running = [await llm.submit(f"running {i}", endless) for i in range(2)]
        waiting = await llm.submit("waiting", endless)
        await anext(running[0])
        waiting.abort()
        output = await anext(waiting)
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        assert output.outputs[0].token_ids == []
        await anext(running[1])
        assert llm.abort(running[1].request_id)
        outputs = [output async for output in running[1]]
        assert outputs[-1].outputs[0].finish_reason == "abort"
        prefilling = await llm.submit("p" * 400, endless)  # 25 steps
        await asyncio.sleep(0)
        prefilling.abort()
        await running[0].aclose()
        assert not llm.abort(running[0].request_id)
        assert llm.num_in_flight == 0
        await idle(llm)
        assert llm.stats.generation_tokens < 9000
        assert (await collect(llm, "next", GREEDY))[1]


@both
async def test_cancelling_a_task_aborts(
    make_engine: MakeEngine, slow_folder: str, in_process: bool
) -> None:
    async with make_engine(in_process=in_process, model=slow_folder) as llm:
        task = asyncio.create_task(collect(llm, "hi", LONG))
        await until(lambda: llm.num_in_flight > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.num_in_flight == 0
        await idle(llm, generated=0)


async def test_leaving_a_stream_aborts(make_engine: MakeEngine, slow_folder: str) -> None:
    async with make_engine(model=slow_folder) as llm:
        async with await llm.submit("hi", LONG) as stream:
            await anext(stream)
        assert llm.num_in_flight == 0
        assert [output async for output in stream] == []
        generator = llm.generate("hi", LONG)
        await anext(generator)
        await generator.aclose()  # type: ignore[attr-defined]
        assert llm.num_in_flight == 0
        await idle(llm)


# --- refusals -------------------------------------------------------------------------------------
async def test_a_full_queue_refuses_until_there_is_room(
    make_engine: MakeEngine, slow_folder: str
) -> None:
    async with make_engine(model=slow_folder, max_num_seqs=1, max_queue=2) as llm:
        streams = [await llm.submit("hi", LONG) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 sequences are in flight"):
            await llm.submit("hi", GREEDY)
        streams[0].abort()
        last = await llm.submit("hi", GREEDY)
        for stream in streams:
            stream.abort()
        assert (await last.last()).finished


async def test_a_request_id_is_used_once_at_a_time(
    make_engine: MakeEngine, slow_folder: str
) -> None:
    async with make_engine(model=slow_folder) as llm:
        stream = await llm.submit("hi", LONG, request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            await llm.submit("hi", GREEDY, request_id="mine")
        stream.abort()
        again = await llm.submit("hi", GREEDY, request_id="mine", kind="final")
        assert (await again.last()).request_id == "mine"


@both
async def test_a_failing_request_disturbs_nobody(
    make_engine: MakeEngine, make_folder: Callable[..., str], in_process: bool
) -> None:
    async with make_engine(in_process=in_process, model=make_folder("nan", nan_token=1)) as llm:
        good = asyncio.create_task(collect(llm, "hi", GREEDY))
        bad = await llm.submit([1], GREEDY)
        with pytest.raises(NonFiniteLogitsError):
            await bad.last()
        assert (await good)[1]
        assert llm.is_ready


async def test_chat(make_engine: MakeEngine) -> None:
    messages = [Message("user", "hi")]
    async with make_engine() as llm:
        stream = await llm.submit_chat(messages, GREEDY, kind="final")
        assert stream.prompt_token_ids == [257, 104, 105, 256, 258]
        output = await stream.last()
        assert output.prompt == "<|user|>hi<|end|><|assistant|>"
        options = ChatOptions(continue_final_message=True)
        assert llm.render_chat([*messages, Message("assistant", "so")], options).endswith("so")
        outputs = [output async for output in llm.chat(messages, GREEDY)]
        assert outputs[-1].finished
        with pytest.raises(TemplateError, match="no chat template named 'x'"):
            await llm.submit_chat(messages, GREEDY, chat=ChatOptions(template="x"))


async def test_texts_of_any_size(make_engine: MakeEngine) -> None:
    async with make_engine() as llm:
        for text in ("short", "long " * 5000):
            ids = await llm.encode(text)
            assert await llm.decode(ids) == text
        prompts: list[Any] = ["long " * 5000, {"prompt": "long " * 5000}, [1] * 25000]
        for prompt in prompts:
            with pytest.raises(InvalidRequestError, match="25000 tokens"):
                await llm.submit(prompt)
        wrong: list[Any] = [5, None, {"text": "hi"}]
        for prompt in wrong:
            with pytest.raises(InvalidRequestError):
                await llm.submit(prompt)


async def test_a_model_without_template_serves_everything_but_chat(
    make_engine: MakeEngine, make_folder: Callable[..., str]
) -> None:
    folder = make_folder("bare")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    async with make_engine(model=folder) as llm:
        assert (await collect(llm, "hi", GREEDY))[1]
        with pytest.raises(TemplateError, match="--chat-template"):
            await llm.submit_chat([Message("user", "hi")])


async def test_sampling_defaults_of_the_model(
    make_engine: MakeEngine, make_folder: Callable[..., str]
) -> None:
    folder = make_folder("defaults")
    config = {"temperature": 0.5, "top_k": 7}
    (Path(folder) / "generation_config.json").write_text(json.dumps(config))
    async with make_engine(model=folder, in_process=False) as llm:
        assert llm.default_sampling_params == config
        assert llm.sampling_params(top_k=1) == SamplingParams(temperature=0.5, top_k=1)
