"""/v1/responses through the official openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.waiting import wait_until

from .conftest import RunningServer

GREEDY: Any = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_from_the_real_model(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="Hello!", **GREEDY)
    assert answer.output_text == "Hello! How can I help you today?"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = client.responses.retrieve(answer.id)
    assert again.output_text == answer.output_text
    (item,) = client.responses.input_items.list(answer.id).data
    assert item.type == "message"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(answer.id)


def test_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    options: Any = {**GREEDY, "input": "Tell me a story.", "max_output_tokens": 30}
    whole = client.responses.create(**options)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].response.output_text == text
    with client.responses.stream(input="Hello!", **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello! How can I help you today?"


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Hello!", instructions="Be kind.", **GREEDY)
    second = client.responses.create(
        input="Tell me a story.", previous_response_id=first.id, max_output_tokens=12, **GREEDY
    )
    chat = client.chat.completions.create(
        messages=[
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Tell me a story."},
        ],
        max_tokens=12,
        **GREEDY,
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id
    items: Any = [*first.output, {"role": "user", "content": "Tell me a story."}]
    by_hand = client.responses.create(
        input=[
            {"role": "user", "content": "Hello!"},
            *(item if isinstance(item, dict) else item.model_dump() for item in items),
        ],
        max_output_tokens=12,
        store=False,
        **GREEDY,
    )
    assert by_hand.output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_hand.id)


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(input="Hello!", background=True, **GREEDY)
    assert begun.status == "queued"
    wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text.startswith("Hello!")
    streamed: list[Any] = list(
        client.responses.create(input="Hello!", background=True, stream=True, **GREEDY)
    )
    assert streamed[-1].type == "response.completed"
    again = client.responses.retrieve(streamed[-1].response.id, stream=True, starting_after=2)
    assert list(again) == streamed[3:]


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}


def test_the_answer_follows_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "name": "color", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(input="A color?", text={"format": wanted}, **GREEDY)
    assert json.loads(answer.output_text)["color"] in ("red", "green")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


def test_a_function_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "strict": True,
    }
    ask: Any = {"input": "What is the weather in Paris?", "tools": [tool], **GREEDY}
    answer = client.responses.create(**ask)
    call = answer.output[-1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    events = list(client.responses.create(**ask, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    final = client.responses.create(
        input=[result], previous_response_id=answer.id, tools=[tool], **GREEDY
    )
    assert final.output_text
    result["call_id"] = "call_odd"
    with pytest.raises(openai.BadRequestError, match=r"No tool call found.*'call_odd'"):
        client.responses.create(input=[result], previous_response_id=answer.id, **GREEDY)
    forced = client.responses.create(
        input="Hello!",
        tools=[tool],
        tool_choice={"type": "function", "name": "get_weather"},
        **GREEDY,
    )
    assert forced.output[-1].type == "function_call"


def test_a_schema_goes_with_thoughts_and_streams(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "name": "color", "schema": SCHEMA, "strict": True}
    ask: Any = {"input": "A color?", "text": {"format": wanted}, "max_output_tokens": 400}
    for extra in ({}, {"reasoning": {"effort": "low"}}):
        whole = client.responses.create(**ask, **extra, **GREEDY)
        with client.responses.stream(**ask, **extra, **GREEDY) as stream:
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        if whole.status == "completed":
            assert json.loads(whole.output_text)["color"] in ("red", "green")


def test_a_required_call_follows_its_schema(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
    ask: Any = {"input": "Hello!", "tools": [tool], "tool_choice": "required", **GREEDY}
    answer = client.responses.create(**ask, parallel_tool_calls=False)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["color"] in ("red", "green")
    with client.responses.stream(**ask, parallel_tool_calls=False) as stream:
        final = stream.get_final_response()
    (again,) = [item for item in final.output if item.type == "function_call"]
    assert again.arguments == call.arguments


def test_log_probabilities_of_the_text_alone(client: openai.OpenAI) -> None:
    """Thoughts have none, whose tokens come first."""
    ask: Any = {
        "input": "What is 3 plus 4? /think",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        **GREEDY,
    }
    whole = client.responses.create(**ask)
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message"]
    part = whole.output[1].content[0]
    assert "".join(each.token for each in part.logprobs).strip() == part.text == "3 plus 4 is 7."
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    told = []
    for event in client.responses.create(**ask, stream=True):
        if event.type == "response.output_text.delta":
            told += event.logprobs
    assert [each.token for each in told] == [each.token for each in part.logprobs]
    assert whole.top_logprobs == 2


def test_errors_of_forms_are_in_the_words_of_this_api(client: openai.OpenAI) -> None:
    schema = {"type": "integer", "minimum": 9, "maximum": 3}
    wanted: Any = {"type": "json_schema", "name": "x", "schema": schema}
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(input="x", text={"format": wanted}, **GREEDY)
    assert info.value.param == "text.format"
    assert "response_format" not in str(info.value)
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "string"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.parameters") as info:
        client.responses.create(input="x", tools=[tool], **GREEDY)
    assert info.value.param == "tools[0].parameters"


def test_errors_name_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(input="x", previous_response_id="resp_none", **GREEDY)
    assert gone.value.param == "previous_response_id"
    image = {"type": "input_image", "image_url": "http://localhost/x.png", "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="reads text alone here"):
        client.responses.create(input=[{"role": "user", "content": [image]}], **GREEDY)
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        client.responses.create(input="x", max_output_tokens=0, **GREEDY)
