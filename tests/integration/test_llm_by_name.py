"""The engine on backends asked for by name: the demo model, and the same draws as the cpu one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams

from tests.usable_backends import backend_spec

REFERENCE = Path(__file__).parents[1] / "data" / "demo" / "reference_greedy.json"
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 27,
    "num_threads": 1,
}


@pytest.fixture(params=["torch", "metal"])
def backend(request: pytest.FixtureRequest) -> str:
    for name in (request.param, "cpu"):
        backend_spec(name)
    return str(request.param)


def test_reference_answers(backend: str) -> None:
    cases = json.loads(REFERENCE.read_text())["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM("demo", backend=backend, **CONFIG) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in cases], params)
    assert [output.outputs[0].token_ids for output in outputs] == [
        case["greedy_ids"] for case in cases
    ]


def test_a_seeded_answer_is_that_of_the_cpu_backend(backend: str) -> None:
    """Every rule of the sampler, in one batch."""
    rules: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"logit_bias": {300: 4.0}},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    ]
    params = [
        SamplingParams(temperature=0.9, max_tokens=24, seed=seed, logprobs=2, **rule)
        for seed, rule in enumerate(rules)
    ]
    answers = {}
    for name in ("cpu", backend):
        with LLM("demo", backend=name, **CONFIG) as llm:
            outputs = llm.generate(["Once upon a time there was"] * len(params), params)
            answers[name] = [output.outputs[0] for output in outputs]
    assert [answer.token_ids for answer in answers[backend]] == [
        answer.token_ids for answer in answers["cpu"]
    ]
    for one, other in zip(answers[backend], answers["cpu"], strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


NAMES = ("Anna", "Lily", "Sue", "Mia", "Tom", "Ben", "Max", "Sam", "Tim", "Joe", "Ann", "Kim")


def test_chunks_preemption_and_prefix_hits_change_no_answer(backend: str) -> None:
    """Greedy answers of float32 are the same where there is hardly room."""
    story = "Once upon a time there was a little girl who lived in a house by the sea. "
    prompts = [f"{story * 3}Her name was {name}" for name in NAMES]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = []
    for tight in ({}, {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "max_model_len": 384}):
        options = {key: value for key, value in CONFIG.items() if key != "kv_cache_memory_bytes"}
        options |= {"num_kv_blocks": 256, "max_model_len": 384} | tight
        with LLM("demo", backend=backend, **options) as llm:
            outputs = [llm.generate(prompts, params) for _ in range(2)]
        answers += [[output.outputs[0].token_ids for output in batch] for batch in outputs]
    assert answers[0] == answers[1] == answers[2] == answers[3]
