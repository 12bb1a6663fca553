"""Formats derived from real chat templates, beside the recorded ones of their families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.output_format import Calls, OutputFormat
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.formats.answer_reader import AnswerReader, ReadOptions
from vllmx_engine.formats.choice import find_format
from vllmx_engine.formats.derive import derive_calls, derive_thinking
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.renderings import NotDerivedError, Renderings
from vllmx_engine.formats.writer import WrittenCall, write_calls
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_models import output_formats

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
RECORDED = {
    "apertus": output_formats.APERTUS,
    "bielik": output_formats.HERMES,
    "deepseek-r1-distill": output_formats.DEEPSEEK_V3,
    "deepseek-v3.1": output_formats.DEEPSEEK_V31,
    "deepseek-v3.2": output_formats.DEEPSEEK_V32,
    "deepseek-v4": output_formats.DEEPSEEK_V4,
    "devstral": output_formats.MISTRAL,
    "gigachat3.1": output_formats.GIGACHAT,
    "glm-4.6": output_formats.GLM,
    "glm-4.7": output_formats.GLM47,
    "glm-5.2": output_formats.GLM47,
    "kimi-k2": output_formats.KIMI,
    "mimo-vl": output_formats.HERMES,
    "ministral-3": output_formats.MISTRAL,
    "mistral-nemo": output_formats.MISTRAL_LIST,
    "mistral-small-3.2": output_formats.MISTRAL_IDS,
    "qwen2.5": output_formats.HERMES,
    "qwen3": output_formats.HERMES,
    "qwen3-coder": output_formats.QWEN3_CODER,
    "qwen3.5": output_formats.QWEN3_CODER,
    "qwq": output_formats.HERMES,
}
NOT_RECORDED = ("apriel-1.5", "apriel-1.6", "gigachat3", "step-3.5-flash")
MANY = Path(__file__).parents[4] / "shared" / "templates" / "llama.cpp"
SPECIAL = {"bos_token": "<s>", "eos_token": "<｜end▁of▁sentence｜>"}
CALLS = [
    WrittenCall("find", {"what": 'a "b"\n</c>', "where": "北京"}, "abcdef001"),
    WrittenCall("count", {"n": 3, "of": [{"x": None}, True]}, "abcdef002"),
    WrittenCall("now", {}, "abcdef003"),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {"properties": {"what": {"type": "string"}, "where": {"type": "string"}}},
    "count": {"properties": {"n": {"type": "integer"}, "of": {"type": "array"}}},
    "now": {},
}


def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, SPECIAL)


def read(calls: Calls, text: str) -> list[tuple[str, Any]]:
    reader = AnswerReader(OutputFormat("x", calls=calls), ReadOptions(SCHEMAS))
    found = ReadAnswer()
    found.add(reader.push(text))
    found.add(reader.finish())
    assert found.content == ""
    return [(call.name, json.loads(call.arguments)) for call in found.tool_calls]


@pytest.mark.parametrize("name", RECORDED)
def test_derived_and_recorded_are_one(name: str) -> None:
    """They write the same, white space around it aside, and read what the other one writes."""
    derived, recorded = derive_calls(Renderings(template(name))), RECORDED[name].calls
    assert recorded is not None
    texts = [write_calls(calls, CALLS) for calls in (derived, recorded)]
    expected = [(call.name, dict(call.arguments)) for call in CALLS]
    assert read(derived, texts[1]) == read(recorded, texts[0]) == expected
    assert texts[0].strip().startswith(texts[1].strip())
    assert derived.ids == recorded.ids or name in ("devstral", "ministral-3")  # which take any


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_calls_without_a_record_are_derived(name: str) -> None:
    """The derived format is the one that is used, and it reads what it writes."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    found = find_format(load_registry(), {"default": source}, special_tokens=SPECIAL)
    assert found.tools_from == "derived from the chat template, which it predicts"
    assert found.tools_origin == "derived"
    calls = found.format.calls
    assert calls is not None
    expected = [(call.name, dict(call.arguments)) for call in CALLS]
    assert read(calls, write_calls(calls, CALLS)) == expected


@pytest.mark.skipif(not MANY.is_dir(), reason="llama.cpp's collection of templates is not here")
def test_most_templates_that_write_calls_are_derived() -> None:
    """35 of the 48 that name tool calls; each has predicted conversations to the byte."""
    derived = 0
    for path in MANY.glob("*.jinja"):
        try:
            calls = derive_calls(Renderings(ChatTemplate(path.read_text("utf-8"), SPECIAL)))
        except NotDerivedError:
            continue
        derived += 1
        for call in CALLS:  # one at a time: Llama 3 writes no more
            read_back = read(calls, write_calls(calls, [call]))
            assert read_back == [(call.name, dict(call.arguments))], path.name
    assert derived >= 35


def test_thoughts_are_derived() -> None:
    for name in ("qwen3", "qwen3.5"):
        assert derive_thinking(Renderings(template(name))) == output_formats.THINK.thinking
    for name in ("glm-4.6", "seed-oss"):
        thinking = derive_thinking(Renderings(template(name)))
        made_of = RECORDED.get(name, output_formats.SEED).thinking
        assert made_of is not None
        assert (thinking.begin.strip(), thinking.end.strip()) == (
            made_of.begin.strip(),
            made_of.end.strip(),
        )


ODD = """{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}@@{{ c.function.name }}!
{%- for k, v in c.function.arguments.items() %}${{ k }}~{{ BODY }}^{% endfor %}@{% endfor -%}
<|end|>{%- endfor -%}"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ODD.replace("BODY", "v"), "predicted was"),  # a nested value in Python's notation
        (ODD.replace("BODY", "v | upper"), "neither JSON nor between tags"),
        (ODD.replace("{{ c.function.name }}", ""), "writes no calls"),
        ("{{ messages[0].content }}", "leaves out an answer"),
        ("{{ raise_exception('no') }}", "it fails: "),
        (ODD.replace("@@", "").replace("BODY", "v | tojson"), "there is no marker before"),
    ],
)
def test_what_cannot_be_predicted_is_not_used(source: str, reason: str) -> None:
    with pytest.raises(NotDerivedError, match=reason):
        derive_calls(Renderings(ChatTemplate(source)))


def test_a_format_that_nobody_recorded_is_found_and_used() -> None:
    source = ODD.replace("BODY", "v | tojson if v is not string else v")
    found = find_format(load_registry(), {"default": source})
    assert found.tools_from == "derived from the chat template, which it predicts"
    assert found.format.calls is not None
    expected = [(call.name, dict(call.arguments)) for call in CALLS]
    assert read(found.format.calls, write_calls(found.format.calls, CALLS)) == expected


def test_escapes_of_html_in_arguments_are_no_accident() -> None:
    renderings = Renderings(ChatTemplate((TEMPLATES / "qwen3.jinja").read_text("utf-8")))
    text = renderings.calls([WrittenCall("zqnamea", {"zqkeya": "a &#34; b &lt;"})])
    assert "a &#34; b &lt;" in text
