"""Ollama's API: the bodies that its Python client sends, and what that client reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from vllmx_engine.formats.events import ArgumentsPiece, CallBegin, CallEnd, ContentPiece
from vllmx_server.apis.ollama.answers import Turn, Turns
from vllmx_server.apis.ollama.schema import Message
from vllmx_server.generating.fields import closed

from .conftest import MakeServer, Served
from .scripted_model import Script
from .test_pooling import LetterPooler

FLAGS = {"apis": ("ollama",)}
HELLO = [{"role": "user", "content": "hi"}]
OPTIONS = {"num_predict": 6, "temperature": 0.0, "seed": 1, "num_ctx": 4096, "stop": ["zzz"]}
KEY = {"authorization": "Bearer k"}
NANOSECONDS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await served.client.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def whole(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = await served.client.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_stream_and_a_whole_chat_are_one_answer(make_server: MakeServer) -> None:
    async with make_server(FLAGS) as served:
        body = {"messages": HELLO, "options": OPTIONS, "tools": [], "keep_alive": "5m"}
        *pieces, last = await lines(served, "/api/chat", stream=True, **body)
        assert await lines(served, "/api/chat", **body), "a stream is the default"
        found = await whole(served, "/api/chat", stream=False, **body)
        text = "".join(each["message"]["content"] for each in [*pieces, last])
        assert found["message"] == {"role": "assistant", "content": text}
        for each in (found, last):
            assert (each["done"], each["done_reason"]) == (True, "length")
            assert each["eval_count"] == 6
            assert all(isinstance(each[name], int) for name in NANOSECONDS)
            assert each["total_duration"] > each["prompt_eval_duration"] > 0
        assert not any(each["done"] for each in pieces)
        tagged = await whole(served, "/api/chat", **{**body, "model": "fake:latest"}, stream=False)
        assert tagged["message"] == found["message"]
        same = await served.post(
            "/v1/chat/completions", messages=HELLO, max_tokens=6, temperature=0, ignore_eos=False
        )
        assert same.json()["choices"][0]["message"]["content"] == text
        await served.becomes_idle()


async def test_objects_have_the_properties_that_a_format_names(make_server: MakeServer) -> None:
    shape = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    nested = {"type": "object", "properties": {"b": {"anyOf": [shape]}}, "required": ["b"]}
    async with make_server(FLAGS) as served:
        for seed in range(6):
            found = await whole(served, "/api/chat", messages=HELLO, format=nested, stream=False,
                                options={"seed": seed, "num_predict": 400})  # fmt: skip
            if found["done_reason"] == "stop":
                assert json.loads(found["message"]["content"]) == {"b": {"a": 1}}
    assert closed(nested)["properties"]["b"]["anyOf"][0]["additionalProperties"] is False
    named = {"properties": {"properties": {"type": "string"}, "x": {"items": [{"properties": {}}]}}}
    assert closed(named) == {
        "properties": {
            "properties": {"type": "string"},
            "x": {"items": [{"properties": {}, "additionalProperties": False}]},
        },
        "additionalProperties": False,
    }
    kept = {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}
    assert closed(kept | {}) == kept
    opened: dict[str, Any] = {"properties": {}, "additionalProperties": {"properties": {}}}
    assert closed(opened)["additionalProperties"] == {
        "properties": {},
        "additionalProperties": False,
    }


async def test_a_prompt_goes_on_from_its_context(make_server: MakeServer) -> None:
    async with make_server(FLAGS) as served:
        short = {"stream": False, "options": OPTIONS}
        first = await whole(served, "/api/generate", prompt="ab", raw=True, **short)
        ids = [*b"ab", *first["context"][2:]]
        assert first["context"] == ids
        assert len(ids) == 2 + first["eval_count"]
        second = await whole(served, "/api/generate", prompt="c", raw=True, context=ids, **short)
        assert second["prompt_eval_count"] == len(ids) + 1
        chat = await whole(served, "/api/generate", prompt="c", system="s", **short)
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]
        same = await whole(served, "/api/chat", messages=turns, **short)
        assert chat["response"] == same["message"]["content"]
        assert chat["prompt_eval_count"] == same["prompt_eval_count"]
        later = await whole(served, "/api/generate", prompt="c", system="s", context=ids, **short)
        assert later["prompt_eval_count"] == chat["prompt_eval_count"] + len(ids)
        scored = await whole(served, "/api/generate", prompt="a", logprobs=True, top_logprobs=2,
                             **short)  # fmt: skip
        assert all(len(each["top_logprobs"]) == 2 for each in scored["logprobs"])
        assert (await whole(served, "/api/generate"))["done_reason"] == "load"
        assert (await whole(served, "/api/chat", messages=[]))["message"]["content"] == ""


async def test_formats(make_server: MakeServer) -> None:
    async with make_server(FLAGS) as served:
        schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        found = await whole(
            served, "/api/chat", messages=HELLO, format=schema, stream=False,
            options={"num_predict": 200, "seed": 3},
        )  # fmt: skip
        assert json.loads(found["message"]["content"]) == {"a": 7}
        wrong = await served.client.post(
            "/api/chat", json={"model": "fake", "messages": HELLO, "format": {"type": "no"}}
        )
        assert wrong.status_code == 400
        assert set(wrong.json()) == {"error"}


def test_turns_become_those_of_chats() -> None:
    def turn(**fields: Any) -> dict[str, Any]:
        return msgspec.convert(fields, Message).for_template(0)

    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    called = turn(role="assistant", thinking="hm", tool_calls=[call])
    assert called["reasoning_content"] == "hm"
    assert called["tool_calls"][0]["function"] == call["function"]
    told = turn(role="tool", content="sun", tool_name="f")
    assert told == {"role": "tool", "content": "sun", "name": "f"}
    seen = turn(role="user", content="look", images=["QUJD"])["content"]
    assert seen[0]["image_url"]["url"] == "data:;base64,QUJD"
    assert seen[1] == {"type": "text", "text": "look"}


def test_calls_are_whole() -> None:
    turns = Turns()
    assert turns.of([CallBegin(0, "c0", "f"), ArgumentsPiece(0, '{"x"')]) is None
    found = turns.of([ArgumentsPiece(0, ":1}"), CallEnd(0), ContentPiece("a")])
    assert isinstance(found, Turn)
    (call,) = found.tool_calls or ()
    assert call == {"id": "c0", "function": {"name": "f", "index": 0, "arguments": {"x": 1}}}
    assert found.content == "a"
    cut = turns.of([CallBegin(1, "c1", "g"), ArgumentsPiece(1, '{"x"'), CallEnd(1)])
    assert cut is not None
    (call,) = cut.tool_calls or ()
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_thoughts_and_calls(make_server: MakeServer, is_streamed: bool) -> None:
    """What the client makes of a Python function is taken, and the call comes back whole."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with make_server(FLAGS) as served:
        call = '<tool_call>{"name": "f", "arguments": {"city": "Rom"}}</tool_call>'
        script = Script(served, f"<think>hm</think>Yes.{call}")
        asked = {"messages": HELLO, "tools": [tool], "think": True}
        if is_streamed:
            pieces = [each["message"] for each in await lines(served, "/api/chat", **asked)]
        else:
            pieces = [(await whole(served, "/api/chat", stream=False, **asked))["message"]]
        assert "".join(each.get("thinking", "") for each in pieces) == "hm"
        assert "".join(each["content"] for each in pieces) == "Yes."
        (called,) = [called for each in pieces for called in each.get("tool_calls", ())]
        assert called["function"] == {"name": "f", "index": 0, "arguments": {"city": "Rom"}}
        assert script.options[0].template_kwargs["enable_thinking"] is True


async def test_vectors(make_server: MakeServer) -> None:
    async with make_server(FLAGS) as served:
        pooler = served.state.pooler = LetterPooler()
        found = await whole(served, "/api/embed", input=["aab", "c"], keep_alive=1.5, options={})
        assert [len(each) for each in found["embeddings"]] == [8, 8]
        assert found["prompt_eval_count"] == 4
        short = await whole(served, "/api/embed", input="aab", dimensions=3)
        (vector,) = short["embeddings"]
        assert sum(each * each for each in vector) == pytest.approx(1)
        assert len((await whole(served, "/api/embeddings", prompt="aab"))["embedding"]) == 8
        assert pooler.options is not None
        assert pooler.options.max_tokens == 512, "longer inputs are cut"
        long = {"model": "fake", "input": "a" * 60, "truncate": False}
        assert (await served.client.post("/api/embed", json=long)).status_code == 400


async def test_models(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "web": False}) as served:
        client = served.client
        (entry,) = (await client.get("/api/tags")).json()["models"]
        assert entry["name"] == entry["model"] == "fake"
        assert len(entry["digest"]) == 64
        (loaded,) = (await client.get("/api/ps")).json()["models"]
        assert loaded["context_length"] == 512
        shown = await whole(served, "/api/show")
        assert "completion" in shown["capabilities"]
        assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 512
        assert (await client.get("/api/version")).json()["version"]
        assert [each["status"] for each in await lines(served, "/api/pull")][-1] == "success"
        assert (await whole(served, "/api/pull", stream=False))["status"] == "success"
        gone = await client.post("/api/pull", json={"model": "other", "stream": True})
        assert gone.status_code == 404
        assert "downloads nothing" in gone.json()["error"]
        assert (await client.head("/")).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat = 2 is not served"),
        ({"options": {"nonsense": 1}}, "options.nonsense"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"seed": -(2**70)}}, "options.seed"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"template": "{{ .Prompt }}"}, "--chat-template"),
        ({"suffix": "b"}, "suffix is not served"),
        ({"images": ["QUJD"]}, "image"),
        ({"think": "very"}, "think"),
        ({"format": "xml"}, "format"),
        ({"model": "other"}, "'other' is not served"),
        ({"context": [10**6]}, "1000000"),
        ({"prompt": "", "keep_alive": 0}, "--idle-unload-s"),
    ],
)
async def test_what_cannot_be_served_is_named(
    served_ollama: Served, body: dict[str, Any], words: str
) -> None:
    asked = {"model": "fake", "prompt": "ab", **body}
    refused = await served_ollama.client.post("/api/generate", json=asked)
    assert refused.status_code in (400, 404), refused.text
    assert set(refused.json()) == {"error"}
    assert words in refused.json()["error"]


@pytest.fixture
async def served_ollama(make_server: MakeServer) -> Any:
    async with make_server(FLAGS) as served:
        yield served


async def test_keys_and_unknown_paths(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "api_key": ("k",)}) as served:
        for path in ("/api/chat", "/api/nowhere"):
            refused = await served.client.post(path, json={"model": "fake", "messages": HELLO})
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]
        missing = await served.client.delete("/api/delete", headers=KEY)
        assert missing.status_code == 404
        assert "DELETE /api/delete" in missing.json()["error"]
        openai = await served.client.post("/v1/completions", json={}, headers=KEY)
        assert "message" in openai.json()["error"], "other APIs keep their shape"
        document = (await served.client.get("/openapi.json", headers=KEY)).json()
        assert "/api/chat" in document["paths"]


async def test_programs_need_no_content_type_and_web_pages_do(served_ollama: Served) -> None:
    body = b'{"model": "fake"}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in ({}, form):
        sent = await served_ollama.client.post("/api/generate", content=body, headers=headers)
        assert sent.status_code == 200, sent.text
        for mark in ({"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            page = {**headers, **mark}
            refused = await served_ollama.client.post("/api/generate", content=body, headers=page)
            assert refused.status_code == 415
        refused = await served_ollama.client.post("/v1/completions", content=body, headers=headers)
        assert refused.status_code == 415, "other routes are as ever"
    plain = {"content-type": "text/plain"}
    refused = await served_ollama.client.post("/api/generate", content=body, headers=plain)
    assert refused.status_code == 415


async def test_it_is_off_by_default(served: Served) -> None:
    assert (await served.client.get("/api/tags")).status_code == 404
