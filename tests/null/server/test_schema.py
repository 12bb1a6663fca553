"""Request bodies: what is refused, by which name, and what reaches the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.errors import GrammarError, InvalidRequestError
from vllmx_engine.grammar.spec import grammar_spec
from vllmx_server.apis.completions import schema as completions
from vllmx_server.apis.messages import schema as messages
from vllmx_server.apis.text import schema as text
from vllmx_server.generating import chat_body as chat
from vllmx_server.generating import sampling
from vllmx_server.schema.decode import decode

_ALLOWED = "tool_choice.allowed_tools"
_TOOL = {"type": "function", "function": {"name": "f"}}


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "a", "grammar": "b"}, "grammar"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"include_reasoning": 5}, "include_reasoning"),
        ({"response_format": None, "audio": {}}, "audio"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": _allowed("auto", "g"), "tools": [_TOOL]}, f"{_ALLOWED}.tools[0]"),
        ({"tool_choice": _allowed("auto"), "tools": [_TOOL]}, f"{_ALLOWED}.tools"),
        ({"tool_choice": _allowed("never", "f"), "tools": [_TOOL]}, f"{_ALLOWED}.mode"),
        ({"tool_choice": _allowed("auto", "f")}, "tool_choice"),
        ({"reasoning_effort": "odd"}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"tools": [_TOOL] * 257}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1 << 40}, "priority"),
        ({"echo": True}, "echo"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
    ],
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str | None) -> None:
    def read() -> None:
        request = chat_request(**fields)
        request.conversation()
        request.chat_options()
        request.sampling_params({}, max_tokens=1, logprobs=None)

    with pytest.raises(InvalidRequestError) as info:
        read()
    if param is not None:
        assert info.value.param == param


HARMLESS: dict[str, Any] = {
    "tool_choice": "auto", "tools": [], "functions": [], "function_call": "auto", "n": 1,
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
    "verbosity": "medium", "store": False, "metadata": {"a": "b"}, "user": "u", "logit_bias": {},
    "service_tier": "auto", "stop": [], "logprobs": False, "best_of": 1, "stream": False,
    "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "hi"},
    "presence_penalty": 0, "frequency_penalty": 0.0, "use_beam_search": False, "length_penalty": 1,
    "guided_json": None, "structured_outputs": {}, "vllm_xargs": {}, "include_reasoning": True,
    "truncation_side": "left", "kv_transfer_params": None, "session_id": "s", "chat_template": None,
    "add_special_tokens": False, "priority": 0, "return_token_ids": False,
}  # fmt: skip


@pytest.mark.parametrize("fields", [*({name: value} for name, value in HARMLESS.items()), HARMLESS])
def test_what_clients_send_by_default_changes_nothing(fields: dict[str, Any]) -> None:
    request, plain = chat_request(**fields), chat_request()
    assert request.chat_options() == plain.chat_options()
    assert request.conversation() == plain.conversation()

    def params(of: chat.ChatCompletionRequest) -> Any:
        return of.sampling_params({}, max_tokens=of.token_limit, logprobs=of.num_logprobs)

    assert replace(params(request), best_of=None) == params(plain)
    assert bool(request.stream) is False


@pytest.mark.parametrize("name", chat.ChatCompletionRequest.__struct_fields__)
def test_null_is_as_good_as_nothing(name: str) -> None:
    """Clients send null for what they do not set."""
    default = getattr(chat_request(), name)
    if default is None:
        assert getattr(chat_request(**{name: None}), name) is None
    else:
        assert name == "messages"


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


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many objects in each other."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("levels", [31, 60, 61])
def test_a_schema_may_be_as_deep_however_it_comes(levels: int) -> None:
    schema = nested(levels)
    ways: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"json_schema": schema},
    ]
    found = set()
    for way in ways:
        params = sampling.structured_outputs(chat_request(**way))
        assert params is not None
        if levels <= 60:
            found.add(grammar_spec(params).digest)
        else:
            with pytest.raises(GrammarError, match="more than 122 levels") as caught:
                grammar_spec(params)
            assert caught.value.param == next(iter(way))
    assert len(found) == (levels <= 60)


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
        ({"top_p": -0.1}, "top_p"),
        ({"logprobs": -2}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"seed": 1 << 64}, "seed"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_values_outside_their_interval_are_refused(fields: dict[str, Any], param: str) -> None:
    def read() -> None:
        request = completion_request(**fields)
        request.sampling_params({}, max_tokens=request.token_limit, logprobs=request.logprobs)

    with pytest.raises(InvalidRequestError) as info:
        read()
    assert info.value.param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.5}, "temperature must be between 0 and 100, got -1.5"),
        ({"top_p": 2}, "top_p must be between 0 and 1, got 2"),
        ({"n": 10**30}, "n must be between 1 and 128, got 1" + "0" * 30),
        ({"stop": ["x"] * 17}, "stop has 17 entries, at most 16 are allowed"),
        ({"cache_salt": ""}, "cache_salt has 0 characters, at least 1 are allowed"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 entries, at most"),
    ],
)
def test_the_value_and_the_limits_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        completion_request(**fields)
    assert info.value.message.startswith(message)
    assert info.value.param == next(iter(fields))


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


def test_the_words_that_a_field_may_hold_are_listed() -> None:
    efforts = "'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'"
    with pytest.raises(InvalidRequestError) as refused:
        chat_request(reasoning_effort="odd")
    assert refused.value.message == f"reasoning_effort: 'odd' is none of {efforts}"
    with pytest.raises(InvalidRequestError) as refused:
        chat_request(tool_choice=_allowed("odd", "f"), tools=[_TOOL])
    assert refused.value.message == f"{_ALLOWED}.mode: 'odd' is none of 'auto', 'required'"
    turn = {"messages": [{"role": "robot", "content": "x"}], "max_tokens": 1}
    with pytest.raises(InvalidRequestError) as refused:
        decode(json.dumps(turn).encode(), messages.MESSAGES)
    assert refused.value.message == (
        "messages[0].role: 'robot' is none of 'user', 'assistant', 'system'"
    )
    with pytest.raises(InvalidRequestError) as refused:
        chat_request(reasoning_effort="x" * 10_000)
    assert len(refused.value.message) < 300


def test_an_effort_turns_thinking_on_or_off() -> None:
    def told(**fields: Any) -> Any:
        return chat_request(**fields).chat_options().template_kwargs

    assert told() == {}
    none, low = (dict.fromkeys(chat.THINKING_SWITCHES, thinks) for thinks in (False, True))
    assert told(reasoning_effort="none") == {"reasoning_effort": "none", **none}
    assert told(reasoning_effort="low") == {"reasoning_effort": "low", **low}
    own = {"enable_thinking": False, "reasoning_effort": "mine"}
    assert told(reasoning_effort="low", chat_template_kwargs=own) == {**low, **own}
