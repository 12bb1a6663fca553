"""Requests as programs send them that were written for other servers, with what they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import RunningServer, running_server

HELLO = [{"role": "user", "content": "Hello!"}]
CITY = {"city": {"enum": ["Paris", "Rome"]}}
CLOSED = {"type": "object", "additionalProperties": False}  # texts of any length end by chance
PARAMETERS = {**CLOSED, "properties": CITY, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
NAME = {**CLOSED, "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "N", "schema": NAME, "strict": True}}
SHORT = {"temperature": 0, "max_tokens": 8}

OLLAMA: dict[str, dict[str, Any]] = {
    "Home Assistant": {
        "messages": [
            {"role": "system", "content": "You are a voice assistant."},
            {"role": "user", "content": "Weather in Paris?", "images": None},
            {"role": "assistant", "content": None, "thinking": None, "tool_calls": [CALL]},
            {"role": "tool", "content": '{"data": "sunny", "error": null}'},
        ],
        "tools": [TOOL],
        "keep_alive": -1,
        "options": {"num_ctx": 8192},
        "think": False,
        "format": None,
    },
    "Open WebUI": {
        "messages": [
            {"role": "user", "content": "Weather in Paris?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"index": 0, "id": "call_1", "type": "function", **CALL}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "options": {
            "num_predict": 8, "new_topic_penalty": 0.5, "repeat_penalty": 1.1, "mirostat": 0,
            "mirostat_eta": 0.1, "tfs_z": 1, "num_gpu": 1, "use_mmap": True, "stop": [],
        },
    },
    "Continue": {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [TOOL],
        "keep_alive": 1800,
        "options": {"num_ctx": 8096, "num_predict": 8, "num_thread": 4, "mirostat": None},
    },
    "ollama-ai-provider-v2": {
        "messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "top_p": 1,
        "max_output_tokens": 8, "think": False, "options": {"num_predict": 8},
    },
    "n8n": {
        "messages": HELLO,
        "format": "",
        "keep_alive": "5m",
        "options": {
            "low_vram": False, "main_gpu": 0, "num_batch": 512, "num_ctx": 2048, "num_gpu": -1,
            "num_keep": 0, "num_predict": 8, "penalize_newline": True, "repeat_last_n": 64,
            "vocab_only": False, "use_mlock": False, "use_mmap": True, "temperature": 0.7,
        },
    },
}  # fmt: skip

OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "huggingface_hub": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_object", "value": NAME}},
        "choices.0.message.content",
    ),
    "instructor, RESPONSES_TOOLS": (
        "/v1/responses",
        {
            "input": HELLO,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "text": {"format": {"type": "json_schema", "name": "N", "schema": NAME}},
        },
        "output.0.arguments",
    ),
    "a call before a form": (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "tools": [TOOL],
            "tool_choice": "required",
            "response_format": NAMED,
        },
        "choices.0.message.tool_calls.0.function.arguments",
    ),
    "llama.cpp's clients": (
        "/chat/completions",
        {
            "messages": HELLO, "model": "gpt-4o", "id_slot": -1, "cache_prompt": True,
            "timings_per_token": True, "return_progress": True, "grammar": 'root ::= "a"', **SHORT,
        },
        "choices.0.message.content",
    ),
    "llama.cpp's editors": (
        "/completion",
        {
            "prompt": "def f(", "n_predict": 4, "n_cmpl": 1,
            "samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.99, "n_indent": 4,
            "t_max_predict_ms": 1000, "t_max_prompt_ms": 500,
            "response_fields": ["content", "timings/prompt_n"],
        },
        "timings/prompt_n",
    ),
    "SillyTavern": (
        "/completion",
        {
            "prompt": "Once", "n_predict": 4, "n_probs": 0, "stop": [], "seed": -1, "mirostat": 0,
            "typical_p": 1, "min_keep": 0, "logit_bias": [], "ignore_eos": False,
            "dry_multiplier": 0,
            "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        },
        "content",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def neighbour() -> Iterator[RunningServer]:
    """The demo model behind the APIs of its neighbours."""
    with running_server("--apis", "ollama,llamacpp") as running:
        yield running


@pytest.mark.parametrize("client", OLLAMA)
@pytest.mark.parametrize("stream", [False, True])
def test_chats_of_programs_for_ollama(neighbour: RunningServer, client: str, stream: bool) -> None:
    body = {"model": "demo:latest", "stream": stream, **OLLAMA[client]}
    answer = neighbour.post("/api/chat", body)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]
    messages = [line["message"] for line in lines]
    assert any(message["content"] or message.get("tool_calls") for message in messages)
    assert lines[-1]["eval_count"] > 0


def test_what_programs_for_ollama_ask_before_a_chat(neighbour: RunningServer) -> None:
    assert neighbour.get("/").status_code == 200
    assert neighbour.get("/api/version").json()["version"]
    (entry,) = neighbour.get("/api/tags").json()["models"]
    assert entry["model"] == "demo"
    (loaded,) = neighbour.get("/api/ps").json()["models"]
    shown = neighbour.post("/api/show", {"name": "demo"}).json()
    assert f"num_ctx {loaded['context_length']}" in shown["parameters"].splitlines()
    assert "tools" in shown["capabilities"]


@pytest.mark.parametrize("client", OTHERS)
def test_requests_of_other_programs(neighbour: RunningServer, client: str) -> None:
    path, body, where = OTHERS[client]
    answer = neighbour.post(path, {"model": "demo", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for name in where.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    assert value not in (None, "")
    if "value" in json.dumps(body):
        assert json.loads(value)["name"] in ("a", "b")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": HELLO, "tool_choices": "auto"}, "tool_choices"),
        ("/api/chat", {"messages": HELLO, "options": {"num_ctxs": 1}}, "num_ctxs"),
        ("/completion", {"prompt": "a", "samplers": ["top_q"]}, "top_q"),
        ("/completion", {"prompt": "a", "response_fields": "content"}, "response_fields"),
        ("/chat/completions", {"messages": []}, "messages"),
    ],
)
def test_what_nobody_knows_is_refused_by_name(
    neighbour: RunningServer, path: str, body: dict[str, Any], words: str
) -> None:
    answer = neighbour.post(path, {"model": "demo", **body})
    assert answer.status_code == 400
    assert words in answer.text
