"""Beam search equals transformers' on the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllmx import LLM
from vllmx_core.errors import InvalidRequestError
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.beams import BeamSearchParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = ("Once upon a time there was a", "Tom and Lily went to the", "One day")
CASES: tuple[dict[str, Any], ...] = (
    {"beam_width": 1, "max_tokens": 7},
    {"beam_width": 4, "max_tokens": 24},
    {"beam_width": 3, "max_tokens": 40, "length_penalty": -1.0},
    {"beam_width": 5, "max_tokens": 30, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "max_tokens": 40, "early_stopping": True},
    {"beam_width": 4, "max_tokens": 20, "length_penalty": 0.0},
)
ENDS = (16, 14)
"""Tokens of frequent ends, so that beams end at different lengths: more than one id."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="f32", max_model_len=256, num_kv_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def twin() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_are_those_of_transformers(llm: LLM, twin: Any, case: dict[str, Any]) -> None:
    ends = [*llm.tokenizer.eos_token_ids, *ENDS]
    found = llm.beam_search(PROMPTS, BeamSearchParams(**case, stop_token_ids=ENDS))
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = llm.tokenizer.encode(prompt)
        expected = twin.generate(
            torch.tensor([ids]),
            num_beams=case["beam_width"],
            num_return_sequences=case["beam_width"],
            max_new_tokens=case["max_tokens"],
            length_penalty=case.get("length_penalty", 1.0),
            early_stopping=case.get("early_stopping", False),
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=-1,
        ).tolist()
        expected = [[token for token in row if token >= 0] for row in expected]
        assert [sequence.tokens for sequence in output.sequences] == expected
        for sequence in output.sequences:
            assert sequence.cum_logprob == pytest.approx(sum(sequence.logprobs))
            is_end = sequence.tokens[-1] in ends
            assert sequence.finish_reason == ("stop" if is_end else "length")
            assert sequence.text.startswith(prompt)


def test_what_a_search_cannot_keep_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max-logprobs"):
        llm.beam_search("hi", BeamSearchParams(100))
    with pytest.raises(InvalidRequestError, match="length_penalty"):
        BeamSearchParams(2, length_penalty=float("nan"))
    with pytest.raises(InvalidRequestError, match="beam_width"):
        BeamSearchParams(0)
