"""What SageMaker calls, the tokenizer's configuration, and the times of a request in its answer."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import MakeServer, Served
from .test_pooling import LetterPooler

HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


# --- /invocations and /ping -----------------------------------------------------------------------
async def test_a_model_that_generates_answers_its_shapes(served: Served) -> None:
    chat = await served.client.post("/invocations", json=HELLO)
    assert chat.json()["object"] == "chat.completion"
    text = await served.client.post("/invocations", json={"prompt": "hi", "max_tokens": 4})
    assert text.json()["object"] == "text_completion"
    events = await served.events("/invocations", **HELLO)
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1] == "[DONE]"
    for body in ({"input": "a"}, {"query": "a", "documents": ["b"]}, {}, {"prompt": None}):
        refused = await served.client.post("/invocations", json=body)
        assert refused.status_code == 400
        assert "messages or prompt" in refused.json()["error"]["message"]
    wrong = await served.client.post("/invocations", json={**HELLO, "nonsense": 1})
    assert wrong.json()["error"]["param"] == "nonsense"
    for content, why in ((b'{"prompt":', "not valid JSON"), (b"[1]", "expected `object`")):
        headers = {"content-type": "application/json"}
        bad = await served.client.post("/invocations", content=content, headers=headers)
        assert bad.status_code == 400
        assert why in bad.json()["error"]["message"]
    large = {**HELLO, "messages": [{"role": "user", "content": " " * 200_000}]}
    assert (await served.client.post("/invocations", json=large)).status_code == 400
    await served.becomes_idle()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "a"}, "data"),
        ({"messages": HELLO["messages"]}, "data"),
        ({"input": "a", "task": "classify"}, "data"),
        ({"text_1": "a", "text_2": "b"}, "data"),
        ({"queries": "a", "documents": "b"}, "data"),
        ({"query": "a", "documents": ["b"]}, "results"),
        ({"query": "a", "texts": ["b"]}, None),
        ({"inputs": "a"}, None),
    ],
)
async def test_a_model_of_vectors_and_scores_answers_its_shapes(
    served: Served, body: dict[str, Any], field: str | None
) -> None:
    served.state.pooler = LetterPooler()
    response = await served.client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    assert isinstance(response.json(), list) if field is None else response.json()[field]


async def test_a_classifier_classifies(served: Served) -> None:
    served.state.pooler = LetterPooler("classify")
    response = await served.client.post("/invocations", json={"input": "a"})
    assert response.json()["data"][0]["label"] == "few"


async def test_ping_says_whether_requests_are_served(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one",)}) as served:
        for method in ("GET", "POST"):
            assert (await served.client.request(method, "/ping")).status_code == 200
        assert (await served.client.post("/invocations", json=HELLO)).status_code == 401
        served.state.admission.draining = True
        assert (await served.client.get("/ping")).status_code == 503


# --- /tokenizer_info ------------------------------------------------------------------------------
async def test_the_tokenizers_configuration(make_server: MakeServer, tmp_path: Any) -> None:
    flags = {"enable_tokenizer_info_endpoint": True}
    async with make_server(flags) as served:
        found = (await served.client.get("/tokenizer_info")).json()
        assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert found["eos_token"] == served.llm.tokenizer.config["eos_token"]
        assert found["chat_template"] == served.llm.tokenizer.chat_templates["default"]
        config = {"model_max_length": 10**30, "vocab_file": "/home/somebody/vocab.json"}
        served.llm.tokenizer.config = config
        found = (await served.client.get("/tokenizer_info")).json()
        assert found["model_max_length"] == 10**30
        assert "vocab_file" not in found
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    async with make_server(flags, {"chat_template": str(tmp_path / "t.jinja")}) as served:
        found = (await served.client.get("/tokenizer_info")).json()
        assert found["chat_template"] == "{{ messages[0].content }}"


async def test_nobody_sees_it_unless_the_operator_says_so(served: Served) -> None:
    assert (await served.client.get("/tokenizer_info")).status_code == 404
    document = (await served.client.get("/openapi.json")).json()
    assert "/tokenizer_info" not in document["paths"]


# --- per-request metrics --------------------------------------------------------------------------
NAMES = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}


async def test_answers_say_how_long_they_took(make_server: MakeServer) -> None:
    async with make_server({"enable_per_request_metrics": True}, step_s=0.002) as served:
        usage = {"stream_options": {"include_usage": True}}
        for path, asked in (
            ("/v1/chat/completions", {"messages": HELLO["messages"]}),
            ("/v1/completions", {"prompt": "hi"}),
        ):
            whole = (await served.post(path, max_tokens=5, **asked)).json()["metrics"]
            assert whole.keys() == NAMES
            assert all(value >= 0 for value in whole.values())
            assert whole["mean_itl_ms"] == pytest.approx(whole["generation_time_ms"] / 4)
            seconds = (whole["time_to_first_token_ms"] + whole["generation_time_ms"]) / 1000
            assert whole["tokens_per_second"] == pytest.approx(5 / seconds)
            *others, last, done = await served.events(path, max_tokens=5, **asked, **usage)
            assert done == "[DONE]"
            assert last["metrics"].keys() == NAMES
            assert not any("metrics" in each for each in others)
            one = (await served.post(path, max_tokens=1, **asked)).json()["metrics"]
            assert one["mean_itl_ms"] is None
            several = (await served.post(path, max_tokens=2, n=2, **asked)).json()
            assert "metrics" not in several
            unasked = await served.events(path, max_tokens=5, **asked)
            assert not any("metrics" in each for each in unasked[:-1])
        several = await served.complete(["a", "b"], max_tokens=2)
        assert "metrics" not in several


async def test_answers_say_nothing_of_it_unasked(served: Served) -> None:
    assert "metrics" not in await served.complete(max_tokens=2)
