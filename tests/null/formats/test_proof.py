"""A format is used only if it reads back what the chat template writes of answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.formats.answer_reader import AnswerReader, read_options
from vllmx_engine.formats.choice import find_format
from vllmx_engine.formats.derive import derive_calls
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.named import FoundFormat
from vllmx_engine.formats.renderings import Renderings
from vllmx_engine.formats.tool_schemas import tools_by_name
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.template_budget import TemplateLimits

from . import small_templates as small
from .written_answers import ANSWERS

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
MANY = Path(__file__).parents[4] / "shared" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "<｜end▁of▁sentence｜>"}
STRING = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": STRING | {"description": "d"},
                    "n": {"type": "integer", "description": "d"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
USER = [{"role": "user", "content": "Hi"}]
FILES = {
    "apertus": ("apertus", "apertus"),
    "apriel-1.5": ("derived", "none"),
    "apriel-1.6": ("derived", "none"),
    "bielik": ("hermes", "think"),
    "deepseek-r1-distill": ("deepseek-v3", "think"),
    "deepseek-v3.1": ("deepseek-v31", "think"),
    "deepseek-v3.2": ("deepseek-v32", "think"),
    "deepseek-v4": ("deepseek-v4", "think"),
    "devstral": ("mistral", "none"),
    "functionary-3.1": ("function-tag", "none"),
    "functionary-3.2": ("functionary-v32", "none"),
    "gemma-4": ("gemma4", "gemma4"),
    "gigachat3": ("derived", "none"),
    "gigachat3.1": ("gigachat", "none"),
    "glm-4.6": ("glm", "think"),
    "glm-4.7": ("glm47", "think"),
    "glm-5.2": ("glm47", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "granite-4.0": ("hermes", "none"),
    "kimi-k2": ("kimi", "none"),
    "kimi-k3": ("kimi3", "kimi3"),
    "mimo-vl": ("hermes", "none"),
    "minicpm5": ("minicpm5", "think"),
    "minimax-m2": ("minimax", "think"),
    "ministral-3": ("mistral", "mistral"),
    "mistral-nemo": ("mistral-list", "none"),
    "mistral-small-3.2": ("mistral-ids", "none"),
    "mistral-v2": ("mistral-list", "none"),
    "mistral-v3": ("mistral-list", "none"),
    "mistral-v7": ("mistral-list", "none"),
    "phi-3.5": ("none", "none"),
    "qwen2.5": ("hermes", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3-coder": ("qwen3-coder", "none"),
    "qwen3.5": ("qwen3-coder", "think"),
    "qwq": ("hermes", "think"),
    "seed-oss": ("seed", "seed"),
    "smollm3": ("none", "think"),
    "step-3.5-flash": ("derived", "think"),
}
SMALL = {
    "COMMAND_R7B": ("command", "command"),
    "FUNCTIONGEMMA": ("functiongemma", "none"),
    "GEMMA3_PYTHONIC": ("pythonic", "none"),
    "HUNYUAN": ("none", "hunyuan"),
    "HUNYUAN_A13B": ("hunyuan-a13b", "hunyuan-a13b"),
    "INDENTED": ("hermes", "none"),
    "LFM25": ("lfm2", "think"),
    "LLAMA32_PYTHONIC": ("pythonic", "none"),
    "LLAMA4_JSON": ("llama3-json", "none"),
    "LLAMA4_PYTHONIC": ("pythonic", "none"),
    "MINIMAX_M3": ("none", "derived"),
    "MUSE_GLIMMER": ("muse-glimmer", "muse-glimmer"),
    "NEMOTRON_2": ("nemotron", "think"),
    "SOLAR_OPEN": ("solar-open", "solar-open"),
    "TOOLACE": ("pythonic", "none"),
}


def source_of(name: str) -> str:
    if name in SMALL:
        found: str = getattr(small, name)
        return found
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@cache
def found_for(name: str) -> FoundFormat:
    return find_format(load_registry(), {"default": source_of(name)}, special_tokens=SPECIAL)


def names_of(found: FoundFormat) -> tuple[str, str]:
    thinking, _, tools = found.format.name.partition("+")
    return tools or thinking, thinking


def prompt_of(name: str, **variables: Any) -> str:
    template = ChatTemplate(source_of(name), SPECIAL)
    return template.render(USER, TOOLS, chat_template_kwargs=variables)


def read(found: FoundFormat, prompt: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """(thoughts, content, calls) of an answer, which are the same for any pieces."""
    results = []
    for size in (len(text), 1, 3):
        options = read_options(found.format, tools_by_name(TOOLS), prompt)
        reader, answer = AnswerReader(found.format, options), ReadAnswer()
        for at in range(0, len(text), size):
            answer.add(reader.push(text[at : at + size]))
        answer.add(reader.finish())
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        results.append((answer.reasoning.strip(), answer.content.strip(), calls))
    assert results[0] == results[1] == results[2]
    return results[0]


def test_each_template_here_is_in_the_table() -> None:
    assert set(FILES) == {path.stem for path in TEMPLATES.glob("*.jinja")}


@pytest.mark.parametrize("name", [*FILES, *SMALL])
def test_the_format_of_a_template(name: str) -> None:
    assert names_of(found_for(name)) == (FILES | SMALL)[name]


@pytest.mark.parametrize(("name", "variables", "text", "expected"), ANSWERS)
def test_what_models_write_is_read(
    name: str, variables: Mapping[str, Any], text: str, expected: tuple[str, str, list[Any]]
) -> None:
    assert read(found_for(name), prompt_of(name, **variables), text) == expected


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("COMMAND_R7B", "<|START_ACTION|>[", "\n]<|END_ACTION|>"),
        ("NEMOTRON_2", "<TOOLCALL>[", "]</TOOLCALL>"),
        ("LLAMA4_JSON", "", ""),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("functionary-3.1", "", ""),
    ],
)
def test_no_part_of_the_prompt_or_of_the_turns_end_is_part_of_calls(
    name: str, begin: str, end: str
) -> None:
    """Whether or not the template's end of a turn is known as a special token."""
    for special in (SPECIAL, {"bos_token": "<s>"}):
        calls = derive_calls(Renderings(ChatTemplate(source_of(name), special)))
        assert (calls.section_begin, calls.section_end.rstrip()) == (begin, end)


def test_markers_alone_do_not_stand_against_the_template(caplog: pytest.LogCaptureFixture) -> None:
    """The record of these markers would read a call out of prose, and no call of the model's."""
    source = (
        '{% if tools %}As in <tool_call>{"name": "x", "arguments": {}}</tool_call>{% endif %}'
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name ~ c.function.arguments }}{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with caplog.at_level(logging.INFO, "vllmx.formats"):
        found = find_format(load_registry(), {"default": source})
    assert found.format.calls is None
    assert (found.tools_origin, found.tools_from[:8]) == ("not_found", "not read")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    without = source.replace("c.function.name ~ c.function.arguments", "''")
    found = find_format(load_registry(), {"default": without})
    assert (found.tools_origin, found.tools_from[:6]) == ("by_markers", "hermes")


def test_an_answer_is_never_all_thoughts_where_the_template_writes_none() -> None:
    """The prompt without thoughts ends with a tag that the one with thoughts ends with, too."""
    source = (
        "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{% if m.role == 'assistant' %}"
        "{% if thinking is not false %}<|think|><|sep|>{{ m.reasoning_content or '' }}<|close|>"
        "{% endif %}<|say|><|sep|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|open|>assistant<|sep|>"
        "{% if thinking is not false %}<|think|><|sep|>{% else %}<|say|><|sep|>{% endif %}"
        "{% endif %}"
    )
    found = find_format(load_registry(), {"default": source})
    prompt = ChatTemplate(source).render(USER, None, chat_template_kwargs={"thinking": False})
    assert read(found, prompt, "Hello") == ("", "Hello", [])


@pytest.mark.parametrize("name", ["qwen3", "COMMAND_R7B"])
def test_flags_change_a_part_and_not_the_proof_of_the_other(name: str) -> None:
    templates, registry = {"default": source_of(name)}, load_registry()
    found = find_format(registry, templates, reasoning_parser="none", special_tokens=SPECIAL)
    assert found.format.thinking is None
    assert found.tools_from == found_for(name).tools_from


def test_hostile_templates_end() -> None:
    source = "{% for a in range(99999) %}{% endfor %}<tool_call>arguments"
    limits = TemplateLimits(max_steps=1000)
    found = find_format(
        load_registry(), {"x": source}, compiled=lambda: ChatTemplate(source, limits=limits)
    )
    assert (found.tools_origin, found.format.thinking) == ("not_found", None)
    assert "1000 steps" in found.tools_from


def test_a_second_of_the_clock_changes_nothing() -> None:
    """Prompts may hold the time."""
    source = "{{ strftime_now('%f') }}" + source_of("qwen3")
    found = find_format(load_registry(), {"default": source}, special_tokens=SPECIAL)
    assert names_of(found) == ("hermes", "think")


COLLECTION = {
    "llama.cpp/Cohere2MoE": ("command4", "command4"),
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command", "command"),
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": ("none", "none"),
    "llama.cpp/google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "llama.cpp/LFM2-8B-A1B": ("lfm2", "none"),
    "llama.cpp/LFM2.5-Instruct": ("lfm2", "none"),
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": ("llama3-json", "none"),
    "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "none"),
    "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", "think"),
    "llama.cpp/Reka-Edge": ("hermes", "think"),
    "mistral-common/v2": ("mistral-list", "none"),
    "mistral-common/v3_spm": ("mistral-list", "none"),
    "mistral-common/v15_think": ("mistral", "mistral"),
}


@pytest.mark.skipif(not MANY.is_dir(), reason="the collection of templates is not here")
@pytest.mark.parametrize("name", COLLECTION)
def test_the_format_of_a_template_of_the_collection(name: str) -> None:
    source = (MANY / f"{name}.jinja").read_text("utf-8")
    found = find_format(load_registry(), {"default": source}, special_tokens=SPECIAL)
    assert names_of(found) == COLLECTION[name]
