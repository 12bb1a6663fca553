"""Tool calls and thoughts of the real model, as the official openai client reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .conftest import RunningServer

WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 3 plus 4? /think"}]
THOUGHTS = "The user asks for 3 + 4. 3 + 4 = 7."


def tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("get_weather", city="string"), tool("add", a="integer", b="integer")]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, **options)


def test_a_call_and_its_answer(client: openai.OpenAI) -> None:
    answer = ask(client, WEATHER, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    result = {"temperature": 21, "sky": "sunny"}
    turns = [
        *WEATHER,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
    ]
    last = ask(client, turns, tools=TOOLS).choices[0]
    assert last.finish_reason == "stop"
    assert "21" in last.message.content
    assert last.message.tool_calls is None


def test_a_streamed_call(client: openai.OpenAI) -> None:
    chunks = list(ask(client, WEATHER, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    assert calls[0].id.startswith("call_")
    assert calls[0].type == "function"
    assert all(call.index == 0 for call in calls)
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Paris"}
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_a_stop_string_within_a_call(client: openai.OpenAI) -> None:
    """The call is none to run: its arguments are cut."""
    cut = ask(client, WEATHER, tools=TOOLS, tool_choice="required", stop=["ris"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.tool_calls[0].function.arguments == '{"city": "Pa'
    streamed = ask(client, WEATHER, tools=TOOLS, stop=["ris"], stream=True)
    assert [c.choices[0].finish_reason for c in streamed if c.choices[0].finish_reason] == ["stop"]
    whole = ask(client, WEATHER, tools=TOOLS, stop=["</tool_call>"]).choices[0]
    assert whole.finish_reason == "tool_calls"

    function = TOOLS[0]["function"]
    schema = {"name": function["name"], "input_schema": function["parameters"]}
    body = {"messages": WEATHER, "tools": [schema], "max_tokens": 60, "stop_sequences": ["ris"]}
    message = client.post("/messages", body={**body, "temperature": 0}, cast_to=object)
    assert isinstance(message, dict)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "ris")

    body = {"input": WEATHER, "tools": [{"type": "function", **function}], "stop": ["ris"]}
    response = client.post("/responses", body={**body, "temperature": 0}, cast_to=object)
    assert isinstance(response, dict)
    assert [(one["type"], one["status"]) for one in response["output"]] == [
        ("function_call", "incomplete")
    ]


def test_each_choice_has_its_own_calls(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "n": 3, "max_tokens": 120}
    hello = [{"role": "user", "content": "Hello!"}]
    seeded = {"temperature": 1.0, "seed": 5}
    request = {"model": "demo", "messages": hello, **options, **seeded}
    whole = client.chat.completions.create(**request)
    streamed: dict[int, dict[int, list[str]]] = {0: {}, 1: {}, 2: {}}
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                pieces = streamed[choice.index].setdefault(call.index, [])
                pieces.append(call.function.arguments)
    for choice in whole.choices:
        written = [call.function.arguments for call in choice.message.tool_calls or ()]
        pieces = streamed[choice.index]
        assert ["".join(pieces[index]) for index in sorted(pieces)] == written


def test_the_clients_own_gatherer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=WEATHER, tools=TOOLS, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_thoughts(client: openai.OpenAI) -> None:
    answer = ask(client, SUM)
    message = answer.choices[0].message
    assert message.content == "3 plus 4 is 7."
    assert message.reasoning_content == message.reasoning == THOUGHTS
    tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert 10 < tokens < answer.usage.completion_tokens
    chunks = list(ask(client, SUM, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == THOUGHTS
    details = chunks[-1].usage.completion_tokens_details
    assert details.reasoning_tokens == tokens


def test_thoughts_left_out(client: openai.OpenAI) -> None:
    hidden = {"include_reasoning": False}
    message = ask(client, SUM, extra_body=hidden).choices[0].message
    assert message.content == "3 plus 4 is 7."
    assert "reasoning" not in message.model_extra
    chunks = ask(client, SUM, stream=True, extra_body=hidden)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.model_extra for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_thoughts_of_which_the_budget_leaves_a_part(client: openai.OpenAI) -> None:
    answer = ask(client, SUM, max_tokens=8)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length"
    assert message.content == ""
    assert THOUGHTS.startswith(message.reasoning)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize("budget", [0, 1, 6, 500])
def test_a_budget_for_thoughts(client: openai.OpenAI, budget: int) -> None:
    """The end of the thoughts is forced, and the answer goes on; the markers are counted with the
    thoughts."""
    answer = ask(client, SUM, extra_body={"thinking_token_budget": budget})
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert finish == "stop"
    assert message.content
    assert THOUGHTS.startswith(message.reasoning or "")
    if budget == 500:
        assert message.reasoning == THOUGHTS
    else:
        assert tokens == budget + 2
        whole = ask(client, SUM, extra_body={"thinking_token_budget": budget}, stream=True)
        deltas = [chunk.choices[0].delta for chunk in whole]
        assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_budget_goes_with_a_form_of_the_answer(client: openai.OpenAI) -> None:
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"sum": number}, "required": ["sum"]}
    schema["additionalProperties"] = False
    thinks = {"enable_thinking": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    extra = {"thinking_token_budget": 4, "chat_template_kwargs": thinks}
    answer = ask(client, SUM, response_format=form, max_tokens=60, extra_body=extra).choices[0]
    assert isinstance(json.loads(answer.message.content)["sum"], int)
    assert answer.message.reasoning
    assert THOUGHTS.startswith(answer.message.reasoning)


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_holds_behind_the_thoughts(client: openai.OpenAI, stream: bool) -> None:
    """The model begins to think by itself, and the request says that it may."""
    thinks = {"enable_thinking": True}
    form = {"guided_regex": "[0-9]{3}!", "chat_template_kwargs": thinks}
    answer = ask(client, SUM, stream=stream, n=2, extra_body=form)
    for index in range(2):
        if stream:
            continue
        message = answer.choices[index].message
        assert message.reasoning == THOUGHTS
        assert re.fullmatch("[0-9]{3}!", message.content)
        assert answer.choices[index].finish_reason == "stop"
    if stream:
        deltas = [c.delta for chunk in answer for c in chunk.choices if c.index == 1]
        assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == THOUGHTS
        assert re.fullmatch("[0-9]{3}!", "".join(d.content or "" for d in deltas))


@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}])
def test_who_asks_for_no_thoughts_has_the_form_at_once(client: openai.OpenAI, switch: Any) -> None:
    form = {"chat_template_kwargs": switch, "guided_regex": "[0-9]{3}!"}
    message = ask(client, SUM, extra_body=form).choices[0].message
    assert message.reasoning is None
    assert re.fullmatch("[0-9]{3}!", message.content)


def test_reading_goes_with_logprobs_and_token_ids(client: openai.OpenAI) -> None:
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(client, SUM, **options).choices[0]
    chunks = list(ask(client, SUM, stream=True, **options))
    ids = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert ids == whole.token_ids
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [row.token for each in logprobs for row in each.content] == [
        row.token for row in whole.logprobs.content
    ]


def test_none_hides_the_tools(client: openai.OpenAI) -> None:
    plain = ask(client, WEATHER).choices[0].message.content
    assert ask(client, WEATHER, tools=TOOLS, tool_choice="none").choices[0].message.content == plain


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    """The model would rather talk."""
    hello = [{"role": "user", "content": "Hello!"}]
    named = {"type": "function", "function": {"name": "add"}}
    for choice, names, reason in (
        ("required", ("get_weather", "add"), "tool_calls"),
        (named, ("add",), "stop"),  # as OpenAI's
    ):
        answer = ask(client, hello, tools=TOOLS, tool_choice=choice, max_tokens=200).choices[0]
        assert answer.finish_reason == reason
        assert answer.message.content is None
        for call in answer.message.tool_calls:
            assert call.function.name in names
            kinds = {key: type(v) for key, v in json.loads(call.function.arguments).items()}
            assert kinds == ({"a": int, "b": int} if call.function.name == "add" else {"city": str})
    assert len(answer.message.tool_calls) == 1
    stream = ask(client, hello, tools=TOOLS, tool_choice=named, max_tokens=200, stream=True)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].function.name == "add"
    written = "".join(call.function.arguments for call in calls)
    assert written == answer.message.tool_calls[0].function.arguments


def test_strict_tools_in_a_free_answer(client: openai.OpenAI) -> None:
    strict = json.loads(json.dumps(TOOLS))
    for each in strict:
        each["function"]["strict"] = True
    strict[0]["function"]["parameters"]["properties"]["city"] = {"enum": ["Oslo", "Rome"]}
    (call,) = ask(client, WEATHER, tools=strict).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    hello = [{"role": "user", "content": "Hello!"}]
    assert ask(client, hello, tools=strict).choices[0].message.content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "none of the tools",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "given twice"),
        ({"tools": [tool("a b")]}, "a name has 1 to 128"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "extra_body": {"guided_regex": "a"},
            },
            "another form",
        ),
        (
            {"tools": [tool("f", a="nonsense")], "tool_choice": "required"},
            "",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(
    client: openai.OpenAI, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, WEATHER, **options)
    assert message in str(caught.value)


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(client: openai.OpenAI, mode: str, stream: bool) -> None:
    """The model would call another one, and the prompt tells of all."""
    choice = allowed(mode, "add")
    if stream:
        chunks = list(ask(client, WEATHER, tools=TOOLS, tool_choice=choice, stream=True))
        deltas = [call for each in chunks for call in each.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in deltas if call.function.name] == ["add"]
        return
    answer = ask(client, WEATHER, tools=TOOLS, tool_choice=choice, max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert answer.choices[0].finish_reason == "tool_calls"
    free = ask(client, WEATHER, tools=TOOLS, max_tokens=1)
    assert answer.usage.prompt_tokens == free.usage.prompt_tokens


def test_allowed_tools_are_called_as_ever(client: openai.OpenAI) -> None:
    choice = allowed("auto", "get_weather")
    (call,) = ask(client, WEATHER, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    hello = [{"role": "user", "content": "Hello!"}]
    assert ask(client, hello, tools=TOOLS, tool_choice=choice).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="none of the tools") as refused:
        ask(client, WEATHER, tools=TOOLS, tool_choice=allowed("auto", "add", "odd"))
    assert refused.value.param == "tool_choice.allowed_tools.tools[1]"


def test_allowed_tools_of_a_response(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **each["function"]} for each in TOOLS]

    def choose(name: str) -> Any:
        return {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": name}],
        }

    options: dict[str, Any] = {"model": "demo", "input": WEATHER, "temperature": 0, "tools": tools}
    answer = client.responses.create(**options, tool_choice=choose("add"))
    assert [getattr(item, "name", None) for item in answer.output] == ["add"]
    assert answer.tool_choice.to_dict() == choose("add")
    with pytest.raises(openai.BadRequestError, match="none of the tools") as refused:
        client.responses.create(**options, tool_choice=choose("odd"))
    assert refused.value.param == "tool_choice.tools[0]"
