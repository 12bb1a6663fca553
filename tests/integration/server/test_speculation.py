"""Speculation over HTTP: predicted outputs, usage and metrics; answers stay what they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import RunningServer, running_server

STORY = [{"role": "user", "content": "Tell a story about a dog."}]


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    with running_server("--speculate=twin", "--speculate-tokens=4", "--api-workers=2") as server:
        yield server


@pytest.fixture(scope="module")
def predicting() -> Iterator[RunningServer]:
    """Drafts from predictions alone, whether that pays on a busy machine or not."""
    with running_server("--speculate-tokens=8") as server:
        yield server


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True} | fields
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_prediction_saves_steps_and_changes_no_token(
    predicting: RunningServer, as_parts: bool
) -> None:
    plain = chat(predicting)
    assert "accepted_prediction_tokens" not in str(plain["usage"])
    expected = text(plain)
    content: Any = expected.replace("dog", "cat", 1)
    if as_parts:
        content = [{"type": "text", "text": content[:30]}, {"type": "text", "text": content[30:]}]
    steps = predicting.metric("engine_steps_total")
    predicted = chat(predicting, prediction={"type": "content", "content": content})
    assert text(predicted) == expected
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 16
    assert details["rejected_prediction_tokens"] >= 0
    assert predicted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert predicting.metric("engine_steps_total") - steps < 32


@pytest.mark.parametrize(
    ("prediction", "word"),
    [
        ({"type": "text", "content": "a"}, "prediction"),
        ({"type": "content"}, "content"),
        ({"type": "content", "content": 5}, "content"),
        ("text", "prediction"),
    ],
)
def test_wrong_predictions_are_refused(server: RunningServer, prediction: Any, word: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": STORY, "prediction": prediction})
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_a_long_prediction_is_cut_to_the_context(server: RunningServer) -> None:
    answer = chat(server, prediction={"type": "content", "content": "a dog " * 200_000})
    assert text(answer) == text(chat(server))


def test_a_twin_drafts_for_all_requests(drafting: RunningServer, server: RunningServer) -> None:
    for fields in (
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 6, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}, "max_tokens": 80, "ignore_eos": False},
        {"stop": ["."], "seed": 7, "temperature": 0.5},
    ):
        drafted, plain = chat(drafting, **fields), chat(server, **fields)
        assert drafted["choices"] == plain["choices"]
    usage = chat(drafting)["usage"]["completion_tokens_details"]
    assert usage["accepted_prediction_tokens"] > 0
    accepted = drafting.metric("spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafting.metric("spec_decode_num_draft_tokens_total")
    assert drafting.metric("spec_decode_num_accepted_tokens_per_pos_total") == accepted
    predicted = chat(drafting, prediction={"type": "content", "content": text(chat(server))})
    assert text(predicted) == text(chat(server))


def test_usage_of_a_stream_has_its_drafts(drafting: RunningServer) -> None:
    body = {"messages": STORY, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = drafting.post("/v1/chat/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    details = chunks[-1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(texts) == text(chat(drafting, max_tokens=24))
