"""Stages of the demo model as processes: answers to the last bit those of one process, and how they
end."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError

from tests.waiting import PATIENCE_S

from .test_tensor_parallel import (
    BAD_WORDS,
    GREEDY,
    LIMITS,
    PROMPTS,
    SEEDED,
    SEVERAL,
    lost,
    rank_processes,
)

CPU = LIMITS | {"backend": "cpu", "num_threads": 4}


def stages(llm: LLM) -> list[psutil.Process]:
    """The processes of all stages but the first, in order."""
    found = rank_processes()
    assert len(found) == int(llm.info.details["ranks"]) - 1
    return found


def everything(llm: LLM) -> list[Any]:
    """Ids and log-probabilities: prompts in chunks with a common prefix, twice, so that the second
    time has hits; several answers to one prompt; grammars of a kind that is filled in late; more
    text than the cache holds."""
    found = []
    for params in (GREEDY, SEEDED, GREEDY, SEVERAL, BAD_WORDS):
        for output in llm.generate(PROMPTS, params):
            assert len(output.outputs) == params.n
            found += [(one.token_ids, one.logprobs) for one in output.outputs]
    many = [f"{PROMPTS[0] if number % 3 else ''} Number {number}" for number in range(12)]
    drawn = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=6, prompt_logprobs=number % 2)
        for number in range(12)
    ]
    for output in llm.generate(many, drawn):
        found.append((output.outputs[0].token_ids, output.prompt_logprobs))
    return found


def test_four_stages_answer_as_one_process_and_end_with_one_of_them() -> None:
    with LLM("demo", **CPU) as llm:
        expected = everything(llm)
        whole = llm.info
    with LLM("demo", pipeline_parallel_size=4, **CPU) as llm:
        assert everything(llm) == expected
        assert llm.info.num_kv_blocks == whole.num_kv_blocks
        assert llm.info.kv_cache_bytes == whole.kv_cache_bytes
        processes = stages(llm)
        processes[1].kill()
        assert lost(llm) == "rank 2 was killed by SIGKILL"
    for one in processes:
        one.wait(PATIENCE_S)


def test_two_stages_of_another_backend_and_one_that_is_stopped() -> None:
    """numpy runs a stage at once where it is told to; its sums depend on who is in a step."""
    with LLM("demo", **LIMITS) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, BAD_WORDS)]
    with LLM("demo", pipeline_parallel_size=2, **LIMITS) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, BAD_WORDS)]
        assert found == expected
        (last,) = stages(llm)
        last.suspend()
        assert lost(llm) == f"rank 1 (process {last.pid}) hangs or was stopped"
        last.wait(PATIENCE_S)


def test_the_layers_of_stages_can_be_named() -> None:
    with LLM("demo", **CPU) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    with LLM("demo", pipeline_parallel_size=2, pipeline_layers="1,5", **CPU) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.info.details["layers"] == "1,5"
    with pytest.raises(ConfigError, match="and the model has 6 for 2"):
        LLM("demo", pipeline_parallel_size=2, pipeline_layers="4,4", **CPU)


def test_stages_of_two_ranks_answer_as_one_process_and_end_with_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the last one compare the ids of every step, besides."""
    more = CPU | {"dtype": "bfloat16", "deterministic": True}
    with LLM("demo", **more) as llm:
        expected = everything(llm)
        whole = llm.info
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
    with LLM("demo", pipeline_parallel_size=2, tensor_parallel_size=2, **more) as llm:
        assert everything(llm) == expected
        assert llm.info.details["stages"] == "2"
        assert llm.info.num_kv_blocks == whole.num_kv_blocks
        assert llm.info.kv_cache_bytes == whole.kv_cache_bytes
        processes = stages(llm)
        assert len(processes) == 3
        processes[0].kill()
        assert lost(llm) == "rank 1 was killed by SIGKILL"
    for one in processes:
        one.wait(PATIENCE_S)


def test_the_last_rank_of_a_stage_is_stopped() -> None:
    """It tells rank 0 nothing of what it sampled, and is missed all the same."""
    with LLM("demo", pipeline_parallel_size=2, tensor_parallel_size=2, **CPU) as llm:
        llm.generate(PROMPTS[2:], BAD_WORDS)
        *_, last = stages(llm)
        last.suspend()
        assert lost(llm) == f"rank 3 (process {last.pid}) hangs or was stopped"
        last.wait(PATIENCE_S)


def test_more_stages_than_layers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"into 9 stages, .* --pipeline-parallel-size \d at most"):
        LLM("demo", pipeline_parallel_size=9, **LIMITS)
    assert "could not be measured" not in caplog.text  # the error says it
