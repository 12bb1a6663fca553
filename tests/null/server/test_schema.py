"""Request bodies: what is refused, by which name, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_server.schema import chat, completions, text
from vllmx_server.schema.decode import decode


def chat_request(**fields: Any) -> chat.ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), chat.DECODER)
    request.check()
    return request


def completion_request(**fields: Any) -> completions.CompletionRequest:
    request = decode(json.dumps({"prompt": "hi", **fields}).encode(), completions.DECODER)
    request.check()
    return request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1 << 40}, "priority"),
        ({"echo": True}, "echo"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str | None) -> None:
    def read() -> None:
        request = chat_request(**fields)
        request.conversation()
        request.chat_options()

    with pytest.raises(InvalidRequestError) as info:
        read()
    if param is not None:
        assert info.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"} trailing',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "m"}',
    ],
)
def test_malformed_json_is_a_clear_error(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as info:
        decode(body, completions.DECODER)
    assert len(info.value.message) < 400


def test_deep_free_form_json_is_refused() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="levels deep"):
        chat_request(chat_template_kwargs={"a": deep})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 1e9}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"seed": 1 << 64}, "seed"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_values_outside_their_interval_are_refused(fields: dict[str, Any], param: str) -> None:
    request = completion_request(**fields)
    with pytest.raises(InvalidRequestError) as info:
        request.sampling_params({}, max_tokens=request.max_tokens, logprobs=request.logprobs)
    assert info.value.param == param


def test_explicit_values_win_over_the_models_defaults() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    request = completion_request(temperature=0, top_k=5)
    params = request.sampling_params(defaults, max_tokens=3, logprobs=None)
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.9, 5)
    assert params.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_shapes(prompt: Any, expected: Any) -> None:
    assert completion_request(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], 2], ["x"] * 257])
def test_prompt_shapes_that_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        completion_request(prompt=prompt).prompts()


def test_messages_reach_the_template_as_they_were_given() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert chat_request(messages=messages).conversation() == messages


def test_tokenize_wants_one_of_prompt_and_messages() -> None:
    for body in (b"{}", b'{"prompt": "a", "messages": []}'):
        with pytest.raises(InvalidRequestError, match="either"):
            decode(body, text.TOKENIZE).check()
