"""The demo model held to forms by `LLM`: many schemas in one batch, and forced tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vllmx import LLM, SamplingParams, StructuredOutputsParams
from vllmx_core.errors import GrammarError
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.core import commit
from vllmx_engine.grammar import check as grammars
from vllmx_engine.grammar.check import check
from vllmx_engine.text.tokenizer import Tokenizer

from tests.null.grammar.test_schemas import SCHEMAS

CONTACT = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 9}, "zip": {"enum": [1, 22]}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "address"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=64, kv_cache_memory_bytes=1 << 27) as llm:
        yield llm


def test_answers_to_odd_schemas_are_valid(llm: LLM) -> None:
    params = [
        SamplingParams(
            max_tokens=100, seed=seed, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for schema in SCHEMAS.values()
        for seed in range(2)
    ]
    outputs = llm.generate(["As JSON:"] * len(params), params, use_tqdm=False)
    schemas = [schema for schema in SCHEMAS.values() for _ in range(2)]
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (choice,) = output.outputs
        if choice.finish_reason == "stop":
            ended += 1
            validator = jsonschema.validators.validator_for(schema)(schema)
            validator.validate(json.loads(choice.text))
        else:
            assert choice.finish_reason == "length", output.error
    assert ended > len(params) // 2


def contacts(llm: LLM) -> list[list[int]]:
    form = StructuredOutputsParams(json=CONTACT, disable_any_whitespace=True)
    params = [SamplingParams(max_tokens=80, seed=i, structured_outputs=form) for i in range(12)]
    prompts = [f"Contact number {i}:" for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_forced_tokens_change_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are equal to the bit on the CPU, whose sums do not depend on how tokens are
    batched."""
    if llm.info.backend != "cpu":
        pytest.skip("other backends promise no equal bits")
    at_once = contacts(llm)
    monkeypatch.setattr(commit, "MIN_FORCED_TOKENS", 1 << 20)
    assert contacts(llm) == at_once


def test_a_grammar_is_checked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check takes as long as some tokens of an answer, for each prompt of a call."""
    checked: list[object] = []

    def noted(*arguments: Any) -> str:
        checked.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(grammars, "check", noted)
    for choices in (["seen", "once"], ["seen", "twice"], ["seen", "once"]):
        form = StructuredOutputsParams(choice=choices)
        params = SamplingParams(max_tokens=8, structured_outputs=form)
        outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
        assert all(output.outputs[0].text in choices for output in outputs)
    assert len(checked) == 2


def test_a_grammar_that_no_answer_can_follow_starts_nothing(llm: LLM) -> None:
    bad: dict[str, Any] = {"type": "integer", "minimum": 3, "maximum": 1}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=bad))
    with pytest.raises(GrammarError, match="greater than maximum"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), params])


def test_a_form_follows_thoughts_that_the_prompt_opens(tmp_path: Path) -> None:
    """However they are drawn, no answer ends within its thoughts."""
    template = tmp_path / "open.jinja"
    own = Tokenizer.from_folder(MODEL_FOLDER).config["chat_template"]
    begin = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
    assert begin in own
    template.write_text(own.replace(begin, begin.replace("\\n'", "\\n<think>\\n'")))
    form = StructuredOutputsParams(regex="[0-9]{3}!")
    params = [
        SamplingParams(max_tokens=120, seed=seed, temperature=2, structured_outputs=form)
        for seed in range(8)
    ]
    question = [{"role": "user", "content": "What is 3 plus 4?"}]
    with LLM("demo", chat_template=str(template), kv_cache_memory_bytes=1 << 26) as opened:
        outputs = opened.chat([question] * len(params), params, use_tqdm=False)
    ended = 0
    for (choice,) in (output.outputs for output in outputs):
        assert choice.reasoning
        if choice.finish_reason == "stop":
            ended += 1
            assert re.fullmatch("[0-9]{3}!", choice.content or ""), choice.text
    assert ended
