"""What `vllmx complete` reads: flags, lines, JSON lines, lines of an OpenAI batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx.completion_lines import Task, read_lines, records, split_prompts
from vllmx_core.errors import ConfigError
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput


def test_prompts_are_split_at_a_bar_between_spaces_only() -> None:
    assert [task.prompt for task in split_prompts("a | b|c |d| e | ")] == ["a", "b|c |d| e"]
    assert not split_prompts(" | ")


def test_lines_and_json_lines_with_their_own_parameters() -> None:
    text = 'plain\n\n{"prompt": "x", "max_tokens": 3, "temperature": 0, "seed": null}\n'
    text += '{"prompt": [1, 2]}\n{"messages": [{"role": "user", "content": "hi"}], "stop": "."}'
    assert read_lines(text) == [
        Task("plain"),
        Task("x", sampling={"max_tokens": 3, "temperature": 0}),
        Task([1, 2]),
        Task(messages=[{"role": "user", "content": "hi"}], sampling={"stop": "."}),
    ]


def batch(**changes: Any) -> str:
    line: dict[str, Any] = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 5,
        },
    }
    return json.dumps({**line, **changes})


def test_lines_of_an_openai_batch() -> None:
    (task,) = read_lines(batch())
    assert task.custom_id == "one"
    assert task.messages == [{"role": "user", "content": "hi"}]
    assert task.sampling == {"max_tokens": 5}
    (task,) = read_lines(batch(url="/v1/completions", body={"prompt": "x", "n": 2}))
    assert (task.prompt, task.sampling) == ("x", {"n": 2})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": ', "begins with { but is not a JSON object"),
        (
            '{"prompt": "x", "temprature": 1}',
            "'temprature'; did you mean 'temperature'",
        ),
        ('{"prompt": "x", "temperature": -1}', "temperature must be between"),
        ('{"prompt": "x", "messages": []}', "either"),
        ("{}", "either"),
        ('{"prompt": 5}', "a text or a list of token ids"),
        ('{"messages": "hi"}', "a list of objects"),
        ('{"prompt": "x", "logprobs": 1}', "unknown key 'logprobs'"),
        (batch(url="/v1/embeddings"), "must be a POST to /v1/chat/completions or"),
        (batch(method="GET"), "must be a POST"),
        (batch(custom_id=7), "no custom_id"),
        (
            '{"prompt": "x", "structured_outputs": {"jason": {}}}',
            "structured_outputs must be an object with keys of json,",
        ),
        ('{"prompt": "x", "structured_outputs": {}}', "an answer has one form"),
        (batch(extra=1), "unknown key 'extra'"),
        (batch(body={"messages": [], "tools": []}), "unknown key 'tools'"),
        (batch(body={"prompt": "x"}), "needs 'messages'"),
        (batch(body={"messages": [], "stream": True}), "not streamed"),
    ],
)
def test_what_nobody_reads_is_refused_with_its_line(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match="line 2: ") as caught:
        read_lines("fine\n" + line)
    assert text in caught.value.message


def output(error: str | None = None) -> RequestOutput:
    choice = CompletionOutput(index=0, text="yes", token_ids=[1, 2], finish_reason="stop")
    return RequestOutput(
        request_id="7",
        prompt="x",
        prompt_token_ids=[5],
        outputs=[choice],
        finished=True,
        error=error,
    )


def test_answers_of_a_batch_are_lines_of_a_batch() -> None:
    (task,) = read_lines(batch())
    (record,) = records(task, output(), "m")
    assert record["custom_id"] == "one"
    body = record["response"]["body"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    (record,) = records(task, output("the model gave NaN"), "m")
    assert record["response"] is None
    assert record["error"]["message"] == "the model gave NaN"


def test_other_answers_say_what_was_asked() -> None:
    (record,) = records(Task("x"), output(), "m")
    assert record == {
        "prompt": "x",
        "text": "yes",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 2,
    }
