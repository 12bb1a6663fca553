"""Fields of requests: suffix, session_id, chat_template, and echo in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from vllmx_engine.client.request_state import MAX_DELTA_ROWS
from vllmx_engine.text.fim import FimMarks, fim_marks
from vllmx_engine.text.tokenizer import Tokenizer

from .conftest import MakeServer, Served

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def tokenizer_with(*special: str, config: dict[str, Any] | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[U]": 1}, unk_token="[U]"))
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, config)


def test_marks_are_those_that_the_model_has() -> None:
    assert fim_marks(tokenizer_with()) is None
    assert fim_marks(tokenizer_with(*QWEN[:2])) is None, "one is missing"
    marks = fim_marks(tokenizer_with(*QWEN))
    assert marks == FimMarks(*QWEN)
    assert marks.prompt("x", "y") == "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    codestral = fim_marks(tokenizer_with("[PREFIX]", "[SUFFIX]"))
    assert codestral is not None
    assert codestral.prompt("x", "y") == "[SUFFIX]y[PREFIX]x"
    own = {"prefix_token": "<P>", "suffix_token": {"content": "<S>"}, "middle_token": "<M>"}
    assert fim_marks(tokenizer_with("<P>", "<S>", "<M>", config=own)) == FimMarks(
        "<P>", "<S>", "<M>"
    )


async def test_the_middle_of_a_text(make_server: MakeServer, tmp_path: Path) -> None:
    """The prompt is the one that a client would write with the tokens."""
    tokens = {str(259 + i): {"content": token, "special": True} for i, token in enumerate(QWEN)}
    async with make_server(vocab_size=262) as served:
        file = tmp_path / "model" / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
    config["added_tokens_decoder"] = config.get("added_tokens_decoder", {}) | tokens
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tmp_path / "model" / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with make_server(engine={"tokenizer": str(folder)}, vocab_size=262) as served:
        options = {"max_tokens": 5, "seed": 1, "return_token_ids": True}
        filled = await served.complete("ab", suffix="cd", **options)
        by_hand = await served.complete(f"{QWEN[0]}ab{QWEN[1]}cd{QWEN[2]}", **options)
        assert filled["choices"] == by_hand["choices"]
        assert 261 in filled["choices"][0]["prompt_token_ids"]
        for body, param in (
            ({"prompt": [97, 98], "suffix": "x"}, "suffix"),
            ({"prompt": "a", "suffix": "x", "echo": True}, "echo"),
        ):
            response = await served.post("/v1/completions", **body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert await served.complete("ab", suffix="", **options)


async def test_a_model_without_the_tokens_is_named(served: Served) -> None:
    response = await served.post("/v1/completions", prompt="a", suffix="b")
    assert response.status_code == 400
    assert "'fake' has no tokens for filling" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"n": 2}, {"max_tokens": 0}, {"return_token_ids": True}])
async def test_echo_with_logprobs_streams_as_it_is_whole(
    served: Served, body: dict[str, Any]
) -> None:
    asked = {
        "prompt": ["x" * 150, "äb"],
        "echo": True,
        "logprobs": 2,
        "max_tokens": 6,
        "seed": 1,
        **body,
    }
    whole = (await served.post("/v1/completions", **asked)).json()
    *events, done = await served.events("/v1/completions", **asked)
    assert done == "[DONE]"
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            rows = [part["logprobs"][name] for part in parts if part["logprobs"] is not None]
            assert [value for row in rows for value in row] == values, name
            assert max(map(len, rows)) <= MAX_DELTA_ROWS


async def test_a_session_reaches_the_core(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    add = served.llm._frontend.add

    def noted(requests: Any) -> None:
        seen.extend(request.session_id for request in requests)
        add(requests)

    monkeypatch.setattr(served.llm._frontend, "add", noted)
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    await served.complete(session_id="s1", max_tokens=1)
    for path in ("/v1/chat/completions", "/v1/messages"):
        response = await served.client.post(path, json={**talk, "session_id": path})
        assert response.status_code == 200, response.text
    body = {"input": "hi", "max_output_tokens": 1, "session_id": "s2"}
    assert (await served.client.post("/v1/responses", json=body)).status_code == 200
    assert seen == ["s1", "/v1/chat/completions", "/v1/messages", "s2"]
    for wrong in ("", "x" * 129):
        response = await served.post("/v1/completions", prompt="a", session_id=wrong)
        assert response.json()["error"]["param"] == "session_id"


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


async def test_a_template_of_the_request(make_server: MakeServer) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}], "chat_template": TEMPLATE}
    async with make_server({"trust_request_chat_template": True}) as served:
        tokens = await served.post("/tokenize", **talk)
        assert bytes(tokens.json()["tokens"]) == b"[hi]"
        answer = await served.post("/v1/chat/completions", max_tokens=2, **talk)
        assert answer.json()["usage"]["prompt_tokens"] == 4
        broken = await served.post("/tokenize", **{**talk, "chat_template": "{% for %}"})
        assert broken.status_code == 400
        assert broken.json()["error"]["code"] == "chat_template_error"
        endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
        refused = await served.post("/tokenize", **{**talk, "chat_template": endless})
        assert refused.status_code == 400
        large = await served.post("/tokenize", **{**talk, "chat_template": "x" * 65537})
        assert large.json()["error"]["param"] == "chat_template"
    async with make_server() as served:
        for path in ("/tokenize", "/v1/chat/completions"):
            response = await served.post(path, **talk)
            assert response.status_code == 400
            assert "--trust-request-chat-template" in response.json()["error"]["message"]
