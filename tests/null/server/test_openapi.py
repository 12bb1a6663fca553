"""The API's document: whole, true to what is sent, and a page that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import InvalidRequestError
from vllmx_server.apis.completions.schema import TextChunk, TextCompletion
from vllmx_server.apis.messages.answers import Message, MessagesEvent
from vllmx_server.apis.openapi import document as module
from vllmx_server.apis.openapi.document import UndocumentedRouteError, document
from vllmx_server.apis.openapi.routes import Document
from vllmx_server.apis.pooling.answers import (
    ClassifiedList,
    EmbeddingList,
    PooledList,
    Ranking,
    ScoreList,
)
from vllmx_server.apis.responses.answers import Response as ResponseShown
from vllmx_server.apis.responses.answers import ResponsesEvent
from vllmx_server.apis.responses.output import Output
from vllmx_server.apis.responses.routes import FRAMING
from vllmx_server.apis.responses.tools import ToolForm
from vllmx_server.generating.answers import ChatChunk, ChatCompletion
from vllmx_server.host.apis import all_routes
from vllmx_server.http.operation import Operation
from vllmx_server.http.route import Right, Route
from vllmx_server.limits.rate_limiter import Bucket, _headers, _Use

from .conftest import MakeServer, Served
from .test_messages import EVENTS, named_events
from .test_pooling import LetterPooler

PAGE = Path(module.__file__).parent / "page"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return document(all_routes())


def refs(value: Any) -> set[str]:
    """All that a part of the document refers to."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_every_route_is_documented(found: dict[str, Any]) -> None:
    for route in all_routes():
        shown = route.path.replace(":path}", "}")
        assert route.method.lower() in found["paths"].get(shown, {}), route


def test_a_route_that_is_not_is_named() -> None:
    async def secret(request: Request) -> Response:
        return Response()

    with pytest.raises(
        UndocumentedRouteError, match=r"GET /secret is not documented: give .*secret"
    ):
        document([Route("GET", "/secret", secret, Operation("Secrets"), Right.HOLDERS)])


def test_schemas_are_sound(found: dict[str, Any]) -> None:
    components = found["components"]["schemas"]
    for name, schema in components.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert re.fullmatch(r"\w+", name), "two structs share this name: rename one"
    names = {ref for ref in refs(found) if ref.startswith("#/components/schemas/")}
    assert {ref.rpartition("/")[2] for ref in names} <= set(components)
    ids = [each["operationId"] for item in found["paths"].values() for each in item.values()]
    assert len(ids) == len(set(ids))


def test_headers_of_limits(found: dict[str, Any]) -> None:
    """As `vllmx_server.limits.rate_limiter` makes them."""
    use = _Use(Bucket(3, 2, 0.0), Bucket(9, 0.5, 0.0), None)
    shown = {name.lower(): each["schema"] for name, each in found["components"]["headers"].items()}
    for name, value in _headers(use).items():
        assert re.fullmatch(shown[name]["pattern"], value), name
    answers = found["paths"]["/v1/chat/completions"]["post"]["responses"]
    for status, counts in (("200", True), ("429", True), ("400", False)):
        assert ("X-RateLimit-Reset-Tokens" in answers[status]["headers"]) == counts
    upload = found["paths"]["/v1/files"]["post"]["responses"]
    assert "X-RateLimit-Reset-Tokens" not in upload["200"]["headers"]


def test_intervals_and_words_of_fields(found: dict[str, Any]) -> None:
    schemas = found["components"]["schemas"]
    asked = schemas["ChatCompletionRequest"]
    assert asked["additionalProperties"] is False
    assert asked["required"] == ["messages"]
    number = {"type": "number", "minimum": 0, "maximum": 100}
    assert asked["properties"]["temperature"]["anyOf"][0] == number
    assert "-1: never" in asked["properties"]["thinking_token_budget"]["description"]
    answer = schemas["ChatCompletion"]
    assert set(answer["required"]) == set(answer["properties"]) - {"metrics"}
    delta = schemas["CallDelta"]
    assert delta["required"] == ["index", "function"], "what may be missing is not required"


async def test_the_document_of_a_server_is_its_own(make_server: MakeServer) -> None:
    """Which routes its model answers, which want a key, and how far its fields go."""

    async def document_of(served: Served, **headers: str) -> dict[str, Any]:
        served.state.store(Document).json = None
        response = await served.client.get("/openapi.json", headers=headers)
        return response.json()  # type: ignore[no-any-return]

    def served_paths(shown: dict[str, Any]) -> set[str]:
        operations = {path: item.get("post", {}) for path, item in shown["paths"].items()}
        return {path for path, each in operations.items() if each.get("x-served")}

    def field(shown: dict[str, Any], kind: str, name: str) -> Any:
        return shown["components"]["schemas"][kind]["properties"][name]["anyOf"][0]

    with_key: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    async with make_server(engine={"max_logprobs": 7}) as served:
        shown = await document_of(served)
        of_responses = {"/v1/responses/input_tokens", "/v1/responses/compact"}
        others = {"/v1/messages/count_tokens", *of_responses}
        assert served_paths(shown) == generating | others
        assert shown["paths"]["/v1/embeddings"]["post"]["x-served"] is False
        assert shown["paths"]["/v1/models"]["get"]["security"] == []
        assert shown["paths"]["/shutdown"]["post"]["security"] == with_key
        assert field(shown, "ChatCompletionRequest", "top_logprobs")["maximum"] == 7
        assert field(shown, "CompletionRequest", "truncate_prompt_tokens")["maximum"] == 512
        assert field(shown, "CompletionRequest", "stop_token_ids")["items"]["maximum"] == 258
        assert field(shown, "MessagesRequest", "seed")["maximum"] == (1 << 64) - 1
        served.state.pooler = LetterPooler("embed")
        shown = await document_of(served)
        assert served_paths(shown) == {"/v1/embeddings", "/pooling", "/embed"}
        for kind in ("EmbeddingsRequest", "EmbedRequest"):
            assert field(shown, kind, "dimensions")["maximum"] == 8
    async with make_server({"api_key": ("k",)}) as served:
        shown = await document_of(served, authorization="Bearer k")
        files = {"/docs/{name}": "/docs/page.css", "/web/{name}": "/web/app.js"}
        for path, item in shown["paths"].items():
            for method, each in item.items():
                url = files.get(path, re.sub("[{}]", "", path))
                response = await served.client.request(method, url)
                assert (response.status_code == 401) == (each["security"] == with_key), path


def test_every_body_has_an_example(found: dict[str, Any]) -> None:
    """And one that its schema allows."""
    for path, item in found["paths"].items():
        for operation in item.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = {**content["schema"], "components": found["components"]}
                assert "example" in content, path
                jsonschema.Draft202012Validator(schema).validate(content["example"])


UNKNOWN = (
    "/v1/batches",
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/load_lora_adapter",
    "/v1/mcp/call",
    "/v1/unload_lora_adapter",
    "/update_weights",
    "/replicas/drain",
    "/replicas/add",
)
"""The routes whose examples name what is not there."""


async def test_examples_are_answered(served: Served, found: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {
        "/v1/chat/completions": ChatCompletion,
        "/v1/completions": TextCompletion,
        "/v1/messages": Message,
        "/v1/responses": ResponseShown,
        "/v1/embeddings": EmbeddingList,
        "/pooling": PooledList,
        "/classify": ClassifiedList,
        "/score": ScoreList,
        "/rerank": Ranking,
    }
    served.state.pooler = LetterPooler()
    for path, item in found["paths"].items():
        body = item.get("post", {}).get("requestBody", {}).get("content", {})
        example = body.get("application/json", {}).get("example")
        if example is None or "{" in path or path in UNKNOWN:
            continue  # what these name is not there
        answer = await served.client.post(path, json=example)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        if path in kinds:
            decoded = msgspec.json.decode(answer.content, type=kinds[path])
            assert json.loads(msgspec.json.encode(decoded)) == answer.json()


MORE = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("fields", [{}, USAGE, {"n": 2, **MORE}])
async def test_chunks_of_chats(served: Served, fields: dict[str, Any]) -> None:
    hello = [{"role": "user", "content": "ab"}]
    events = await served.events("/v1/chat/completions", messages=hello, max_tokens=4, **fields)
    assert events.pop() == "[DONE]"
    for event in events:
        decoded = msgspec.convert(event, ChatChunk)
        assert msgspec.to_builtins(decoded) == event


@pytest.mark.parametrize(
    "fields", [{}, USAGE, {"n": 2, "echo": True, "logprobs": 2, "return_token_ids": True}]
)
async def test_chunks_of_texts(served: Served, fields: dict[str, Any]) -> None:
    events = await served.events("/v1/completions", prompt="ab", max_tokens=4, **fields)
    assert events.pop() == "[DONE]"
    for event in events:
        assert msgspec.to_builtins(msgspec.convert(event, TextChunk)) == event


async def test_events_of_messages(served: Served) -> None:
    ask = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "stream": True}
    answer = await served.client.post("/v1/messages", json=ask)
    for name, event in named_events(answer.text):
        assert msgspec.to_builtins(msgspec.convert(event, MessagesEvent)) == event
        assert event["type"] == name


@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]])
async def test_events_of_responses(served: Served, include: list[str]) -> None:
    ask = {"input": "ab", "max_output_tokens": 4, "stream": True, "include": include}
    answer = await served.client.post("/v1/responses", json=ask)
    for name, event in named_events(answer.text):
        assert msgspec.to_builtins(msgspec.convert(event, ResponsesEvent)) == event
        assert event["type"] == name


def test_thoughts_and_calls_in_responses() -> None:
    output = Output(forms={"g": ToolForm("g", is_custom=True)})
    told = [each for event in EVENTS for each in output.take(event)]
    assert {item["type"] for item in output.items} == {
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
    }
    for number, (name, fields) in enumerate(told):
        event = {"type": f"response.{name}", "sequence_number": number, **fields}
        decoded = msgspec.json.decode(msgspec.json.encode(event), type=ResponsesEvent)
        assert isinstance(decoded, ResponsesEvent)


def test_an_error_of_a_stream_of_responses() -> None:
    (_, event), *_ = named_events(FRAMING.failed(InvalidRequestError("no")).decode())
    assert event["type"] == "error"
    assert isinstance(msgspec.convert(event, ResponsesEvent), ResponsesEvent)


# --- the page -------------------------------------------------------------------------------------
async def test_the_page_needs_nobody_else(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("k",)}) as served:
        for path in ("/docs", "/docs/page.js", "/docs/page.css"):
            answer = await served.client.get(path)
            assert answer.status_code == 200, "no key is needed"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert "://" not in answer.text
        assert (await served.client.get("/docs/other")).status_code == 401
        assert (await served.client.get("/openapi.json")).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await served.client.get("/docs/other", headers=key)).status_code == 404
        assert (await served.client.get("/openapi.json", headers=key)).json()["openapi"] == "3.1.0"
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 20_000
    assert "innerHTML" not in (PAGE / "page.js").read_text()
