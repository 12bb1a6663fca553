"""Requests with mixed parameters, answered with and without drafts."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx import LLM, SamplingParams, StructuredOutputsParams
from vllmx_engine.core.hidden_drafter import HiddenDrafter

CONFIG: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 6,
    "num_kv_blocks": 200,
}
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 24, "max_num_seqs": 5, "num_kv_blocks": 9, "max_model_len": 128},
    {"async_scheduling": False},
    {"enable_prefix_caching": False, "enforce_eager": True},
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 20, "n": 2},
    {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
    {"temperature": 0.7, "logit_bias": {300: 2.0}, "min_tokens": 9, "bad_words": ("the",)},
)


def answers(model: str, prompts: Any, **config: Any) -> tuple[list[Any], Any]:
    """The ids and log-probabilities of each prompt with each of PARAMS, and the counters."""
    cases = [(prompt, fields) for fields in PARAMS for prompt in prompts]
    params = [
        SamplingParams(max_tokens=30, seed=number, **fields)
        for number, (_, fields) in enumerate(cases)
    ]
    with LLM(model, **CONFIG | config) as llm:
        found = [
            (output.prompt_logprobs, choice.token_ids, choice.finish_reason, choice.logprobs)
            for output in llm.generate([prompt for prompt, _ in cases], params, use_tqdm=False)
            for choice in output.outputs
        ]
        return found, llm.stats()


def recorded_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(known tokens, drafted ids) of each row and step of drafters by hidden states from now on."""
    found: list[tuple[list[int], list[int]]] = []
    fill = HiddenDrafter.fill

    def noted(drafter: HiddenDrafter, drafts: Any) -> None:
        fill(drafter, drafts)
        known = [[*sequence.tokens] for sequence in drafts.sequences]
        drafted = map(drafts.ids_of, range(len(known)))
        found.extend(pair for pair in zip(known, drafted, strict=True) if pair[1])

    monkeypatch.setattr(HiddenDrafter, "fill", noted)
    return found
