"""LLM, Engine and AsyncLLM with the demo model on the best backend that can run here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, AsyncLLM, Engine, EngineConfig, Message, SamplingParams
from vllmx_core.errors import EngineDeadError, InvalidRequestError
from vllmx_engine.link.process_frontend import ProcessFrontend

from tests.usable_backends import backend_spec
from tests.waiting import wait_until

REFERENCE = Path(__file__).parents[1] / "data" / "demo" / "reference_greedy.json"
CONFIG: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 27}
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
QUESTION = [Message("user", "What is the capital of France?")]


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    backend_spec()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(**CONFIG)) as engine:
        yield engine


def mixed_requests() -> list[tuple[str, SamplingParams]]:
    """64 requests of different lengths and ways to sample."""
    return [
        (
            f"Once upon a time there was {'a very ' * (i % 9)}small number {i}",
            SamplingParams(
                max_tokens=8 + i % 25,
                temperature=0.8 * (i % 2),
                top_k=20 if i % 3 else 0,
                repetition_penalty=1.1 if i % 5 == 0 else 1.0,
                seed=i,
            ),
        )
        for i in range(64)
    ]


def test_reference_answers_in_float32() -> None:
    cases = json.loads(REFERENCE.read_text())["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM("demo", dtype="float32", **CONFIG) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in cases], params)
        assert [llm.tokenizer.encode(case["prompt"]) for case in cases] == [
            case["prompt_ids"] for case in cases
        ]
    assert [output.outputs[0].token_ids for output in outputs] == [
        case["greedy_ids"] for case in cases
    ]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_a_dropped_model_leaves_no_thread() -> None:
    """Those of the backend among them, which Python does not know."""

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    counts = []
    for _ in range(2):
        dropped = LLM("demo", **CONFIG)
        dropped.generate("Once", GREEDY, use_tqdm=False)
        most = count()
        del dropped
        wait_until(lambda most=most: count() < most)  # type: ignore[misc]
        counts.append(count())
    wait_until(lambda: count() <= counts[0])


def test_chat_knows_a_capital(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=None))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == 2
    assert "<|im_end|>" not in output.outputs[0].text


def test_model_s_defaults_apply(llm: LLM) -> None:
    params = llm.sampling_params(max_tokens=5)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 40)


def test_batch_equals_one_at_a_time(llm: LLM) -> None:
    requests = mixed_requests()
    together = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for (prompt, params), output in list(zip(requests, together, strict=True))[::4]:
        (alone,) = llm.generate(prompt, params)
        assert alone.outputs == output.outputs


@pytest.mark.parametrize("kv", ["int8", "fp8", "q8,q4", "q4"])
def test_a_cache_of_codes_answers_alike_in_any_batch(kv: str) -> None:
    requests = mixed_requests()[:12]
    config = CONFIG | {"kv_cache_dtype": kv, "enable_prefix_caching": False}
    with LLM("demo", **config) as llm:
        assert llm.info.kv_cache_dtype == kv
        together = llm.generate([p for p, _ in requests], [params for _, params in requests])
        for (prompt, params), output in list(zip(requests, together, strict=True))[::4]:
            (alone,) = llm.generate(prompt, params)
            assert alone.outputs == output.outputs
        (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=48))
    assert "Paris" in answer.outputs[0].text


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_changes_nothing(llm: LLM, prefix_caching: bool) -> None:
    """32 requests, of which the KV cache holds five to their end."""
    requests = mixed_requests()[:32]
    prompts = [prompt for prompt, _ in requests]
    params = [replace(params, max_tokens=45, ignore_eos=True) for _, params in requests]
    roomy = llm.generate(prompts, params)
    config: dict[str, Any] = {"max_num_batched_tokens": 64, "num_kv_blocks": 21}
    with LLM("demo", enable_prefix_caching=prefix_caching, **config) as small:
        tight = small.generate(prompts, params)
        stats = small._engine._core.stats()
    assert stats.num_preemptions > 5
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks == 21
    assert [output.outputs for output in tight] == [output.outputs for output in roomy]


def test_logprobs_are_those_of_the_greedy_choice(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=0)
    (output,) = llm.chat(QUESTION, params)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entries[token].rank == 1
        assert entries[token].logprob == max(entry.logprob for entry in entries.values())
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_known_log_probabilities_equal_computed_ones() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0, prompt_logprobs=2)
    ids = [[*range(40, 140), *end] for end in ([7, 8], [7, 9], range(20))]
    with LLM("demo", **CONFIG, enable_prefix_caching=False) as llm:
        computed = [llm.generate(one, params)[0] for one in ids]
    with LLM("demo", **CONFIG) as llm:
        found = [llm.generate(one, params)[0] for one in ids]
    assert [output.num_cached_tokens for output in found] == [0, 96, 96]
    for one, other in zip(computed, found, strict=True):
        assert list(one.prompt_logprobs or ()) == list(other.prompt_logprobs or ())
        assert one.outputs == other.outputs


def test_tools_reach_the_template(llm: LLM) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    (output,) = llm.chat(QUESTION, GREEDY, tools=tools)
    assert output.prompt is not None
    assert "get_weather" in output.prompt


def test_engine_stream_equals_sync(engine: Engine) -> None:
    prompt = engine.apply_chat_template(QUESTION, enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    _, prompt_length, stream = engine.generate_stream(GREEDY, prompt)
    pieces = list(stream)
    (whole,) = engine.generate_sync(GREEDY, prompt)
    assert prompt_length == len(whole.prompt_token_ids)
    assert "".join(pieces) == whole.outputs[0].text
    seq_id, _, story = engine.generate_stream(SamplingParams(max_tokens=500), "Once upon")
    next(story)
    assert engine.cancel(seq_id)
    list(story)
    assert story.finish_reason == "abort"


async def _collect(llm: AsyncLLM, prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
    text, ids = "", []
    async for output in llm.generate(prompt, params):
        text += output.outputs[0].text
        ids += output.outputs[0].token_ids
    return text, ids


async def test_own_process_equals_inline_and_survives_a_kill(llm: LLM) -> None:
    requests = mixed_requests()
    wanted = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    async with await AsyncLLM.start(EngineConfig(**CONFIG)) as served:
        answers = await asyncio.gather(*[_collect(served, *request) for request in requests])
        assert answers == [(out.outputs[0].text, out.outputs[0].token_ids) for out in wanted]

        frontend = served._frontend
        assert isinstance(frontend, ProcessFrontend)
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        stream = await served.submit("Once upon", params)
        await anext(stream)
        os.kill(frontend.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await stream.last()
        while not served.is_ready:
            await asyncio.sleep(0.02)
        assert await _collect(served, *requests[0]) == answers[0]


def test_log_probabilities_of_the_whole_vocabulary() -> None:
    with LLM("demo", **CONFIG, max_logprobs=-1) as llm:
        wanted = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
        few = SamplingParams(temperature=0, max_tokens=2, logprobs=5)
        (whole,), (part,) = (llm.generate(["Once upon"], params) for params in (wanted, few))
        rows = [*(whole.outputs[0].logprobs or ()), *(whole.prompt_logprobs or ())[1:]]
        for row in rows:
            assert row is not None
            values = np.array([entry.logprob for entry in row.values()])
            assert len(values) == llm.info.vocab_size
            assert abs(np.logaddexp.reduce(values)) < 1e-4
        for all_of_it, likeliest in zip(rows, part.outputs[0].logprobs or (), strict=False):
            for token, entry in likeliest.items():
                assert all_of_it[token].rank == entry.rank
                assert abs(all_of_it[token].logprob - entry.logprob) < 1e-5


def test_tools_offline(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    params = SamplingParams(temperature=0, max_tokens=64)
    hello = [{"role": "user", "content": "Hello!"}]
    free = llm.chat(hello, params, tools=tools, use_tqdm=False)[0].outputs[0]
    assert (free.content, free.tool_calls) == (free.text, [])
    for choice in ("required", "count"):
        (output,) = llm.chat(hello, params, tools=tools, tool_choice=choice, use_tqdm=False)
        assert output.outputs[0].tool_calls
        call = output.outputs[0].tool_calls[0]
        assert call.name == "count"
        assert isinstance(json.loads(call.arguments)["n"], int)
    with pytest.raises(InvalidRequestError, match="the tools of the request are: 'count'"):
        llm.chat(hello, params, tools=tools, tool_choice="other")


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_and_wakes(level: int) -> None:

    def ids(llm: LLM) -> tuple[int, ...]:
        (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        return tuple(output.outputs[0].token_ids)

    with LLM("demo", num_kv_blocks=64) as llm:
        before = ids(llm)
        assert llm.reset_prefix_cache()
        with pytest.raises(InvalidRequestError, match="1 or 2, got '3'"):
            llm.sleep(3)
        llm.sleep(level)
        llm.sleep(level)
        assert llm.is_sleeping
        with pytest.raises(EngineDeadError, match="closed"):
            ids(llm)
        with pytest.raises(InvalidRequestError, match="got 'gpu'"):
            llm.wake_up(["gpu"])  # type: ignore[list-item]
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping
        assert ids(llm) == before
