"""The official anthropic client against a real server: what applications see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import RunningServer

anthropic = pytest.importorskip("anthropic", reason="the client is not installed")
HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_from_the_real_model(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="demo", max_tokens=64, messages=HELLO, **GREEDY)
    assert answer.id.startswith("msg_")
    assert answer.role == "assistant"
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "Hello! How can I help you today?"
    assert answer.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="demo", messages=HELLO)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_streaming_helper_comes_to_the_same(client: anthropic.Anthropic) -> None:
    options = {
        "model": "demo",
        "max_tokens": 40,
        **GREEDY,
        "system": "You are kind.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}],
    }
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_raw_events_in_their_order(client: anthropic.Anthropic) -> None:
    kinds = [
        event.type
        for event in client.messages.create(
            model="demo", max_tokens=5, messages=HELLO, stream=True, **GREEDY
        )
    ]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="demo", max_tokens=64, messages=HELLO, **GREEDY, stop_sequences=["help"]
    )
    assert answer.content[0].text == "Hello! How can I "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "help")


def test_an_answer_begun_by_the_client_goes_on(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="demo",
        max_tokens=64,
        **GREEDY,
        messages=[*HELLO, {"role": "assistant", "content": "Hello! How"}],
    )
    assert answer.content[0].text.startswith(" can I help")


def test_the_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        model="demo",
        max_tokens=40,
        messages=HELLO,
        **GREEDY,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert list(json.loads(answer.content[0].text)) == ["ok"]


TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def test_a_tool_is_called_and_its_result_is_read(client: anthropic.Anthropic) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": "demo", "max_tokens": 80, "tools": [TOOL], **GREEDY}
    answer = client.messages.create(messages=asked, **options)
    assert answer.stop_reason == "tool_use", answer
    call = answer.content[-1]
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert call.input["city"] == "Paris"
    with client.messages.stream(messages=asked, **options) as stream:
        streamed = stream.get_final_message().content[-1]
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    follow = [
        *asked,
        {"role": "assistant", "content": [each.model_dump() for each in answer.content]},
        {"role": "user", "content": [result]},
    ]
    final = client.messages.create(messages=follow, **options)
    assert final.stop_reason == "end_turn"
    assert final.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_forced(client: anthropic.Anthropic, choice: dict[str, str]) -> None:
    answer = client.messages.create(
        model="demo", max_tokens=80, tools=[TOOL], tool_choice=choice, messages=HELLO, **GREEDY
    )
    assert answer.content[-1].type == "tool_use", "it would say hello"
    assert "city" in answer.content[-1].input


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "demo",
        "max_tokens": 1200,
        **GREEDY,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = client.messages.create(**options)
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"]
    with client.messages.stream(**options) as stream:
        assert [block.type for block in stream.get_final_message().content] == kinds
    plain = client.messages.create(**{**options, "thinking": {"type": "disabled"}})
    assert [block.type for block in plain.content] == ["text"]
    assert all("think>" not in block.text for block in plain.content)


def test_budgets_that_cannot_be(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "demo", "max_tokens": 1500, "messages": HELLO}
    for budget in (0, 1023, 1500):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": budget})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert "thinking.budget_tokens" in refused.value.message


WEATHER = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}, "degrees": {"type": "integer"}},
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_an_answer_follows_its_schema(client: anthropic.Anthropic, thinking: str) -> None:
    options: Any = {
        "model": "demo",
        "max_tokens": 1200,
        **GREEDY,
        "messages": HELLO,
        "thinking": {"type": thinking},
        "output_config": {"format": {"type": "json_schema", "schema": WEATHER}},
    }
    answer = client.messages.create(**options)
    found = json.loads(answer.content[-1].text)
    assert found["sky"] in ("clear", "cloudy")
    assert isinstance(found["degrees"], int)
    with client.messages.stream(**options) as stream:
        assert stream.get_final_message().content[-1].text == answer.content[-1].text


def test_a_strict_tool_is_called_as_its_schema_says(client: anthropic.Anthropic) -> None:
    tool = {**TOOL, "strict": True, "input_schema": WEATHER}
    options: Any = {"model": "demo", "max_tokens": 400, "messages": HELLO, **GREEDY}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(**options, tools=[tool], tool_choice=choice)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert set(call.input) == {"sky", "degrees"}
    with client.messages.stream(**options, tools=[tool], tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input


def test_errors_of_forms_are_in_the_words_of_this_api(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "demo", "max_tokens": 9, "messages": HELLO}
    form = {"type": "json_schema", "schema": {"type": "integer", "minimum": 9, "maximum": 3}}
    with pytest.raises(anthropic.BadRequestError) as info:
        client.messages.create(**options, output_config={"format": form})
    assert "response_format" not in str(info.value)
    tool = {**TOOL, "input_schema": {"type": "string"}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
        client.messages.create(**options, tools=[tool])


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as info:
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    assert info.value.type == "not_found_error"
    assert info.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="is an image, but demo reads text alone"):
        client.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": [image]}]
        )
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="demo", max_tokens=0, messages=HELLO)
