"""Rows whose masks come late say what they would have said, to the bit, on the CPU backend, whose
sums do not depend on how tokens are batched."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx import LLM, SamplingParams, StructuredOutputsParams
from vllmx_core.plugins.registry import load_registry
from vllmx_testing.state_checks import recurrent_model

from tests.held_masks import late_now_and_then
from tests.null.engine.grammar_driver import regex, vocabulary
from tests.usable_backends import backend_spec

from .test_recurrent_engine import PROMPTS, VOCAB, Engine

LIMITS: dict[str, Any] = {
    "backend": "cpu",
    "max_num_seqs": 12,
    "num_kv_blocks": 64,
    "max_model_len": 128,
    "num_threads": 2,
}
CONTACT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputsParams(json=CONTACT, disable_any_whitespace=True),
    StructuredOutputsParams(regex="[a-z ]{8,12}!"),
)


@pytest.fixture(autouse=True)
def needs_the_cpu_backend() -> None:
    backend_spec("cpu")


def answers(llm: LLM) -> list[Any]:
    """Ids and log-probabilities of rows with forms, greedy ones and others, beside plain ones."""
    params = [
        SamplingParams(
            max_tokens=28,
            seed=number,
            temperature=(0.0, 1.0)[number % 2],
            logprobs=(None, 2)[number // 3 % 2],
            structured_outputs=(None, *FORMS)[number % 3],
        )
        for number in range(12)
    ]
    prompts = [f"Contact number {number}:" for number in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.mark.parametrize("size", [1, 2])
def test_late_masks_change_no_answer(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process, and of two ranks, who sample each by itself."""
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")  # ids of every step
    with LLM("demo", tensor_parallel_size=size, **LIMITS) as llm:
        in_time = answers(llm)
        with late_now_and_then() as late:
            assert answers(llm) == in_time
        assert late


def test_states_of_late_rows_do_not_advance_twice() -> None:
    spec, _ = load_registry().choose_backend("cpu")
    tokens = [bytes([ord("a") + token]) for token in range(VOCAB - 1)] + [b"</s>"]

    def ids() -> dict[str, list[int]]:
        engine = Engine(spec.load()(), recurrent_model)
        engine.core.set_vocabulary(vocabulary(tokens, VOCAB - 1))
        for number, prompt in enumerate(PROMPTS):
            pattern = "([a-f][g-k]){20}" if number else "[a-r]{40}"
            engine.add(prompt, 34, grammar=regex(pattern))
        engine.run()
        engine.core.close()
        return engine.ids

    in_time = ids()
    with late_now_and_then() as late:
        assert ids() == in_time
    assert late
