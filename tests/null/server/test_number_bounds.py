"""Every number that a client may send, on every route that takes it: one verdict, and no 5xx."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from vllmx_core.bounds import BOUNDS
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_server.apis.completions import schema as completions
from vllmx_server.apis.messages import schema as messages
from vllmx_server.apis.pooling import schema as pooling
from vllmx_server.apis.responses import schema as responses
from vllmx_server.apis.text import schema as text
from vllmx_server.generating import chat_body as chat
from vllmx_server.generating.fields import GeneratingFields
from vllmx_server.host.apis import all_routes
from vllmx_server.schema.decode import decode
from vllmx_server.schema.json_text import with_whole_numbers

from .conftest import JSON, MakeServer, Served
from .test_pooling import LetterPooler

HELLO = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (chat.ChatCompletionRequest, {"messages": HELLO}),
    "/v1/completions": (completions.CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (responses.ResponsesRequest, {"input": "hi"}),
    "/v1/messages": (messages.MessagesRequest, {"messages": HELLO, "max_tokens": 3}),
    "/v1/embeddings": (pooling.EmbeddingsRequest, {"input": "hi"}),
    "/pooling": (pooling.PoolingRequest, {"input": "hi"}),
    "/classify": (pooling.ClassifyRequest, {"input": "hi"}),
    "/v1/score": (pooling.ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "/v1/rerank": (pooling.RerankRequest, {"query": "a", "documents": ["b"]}),
    "/embed": (pooling.EmbedRequest, {"inputs": "hi"}),
    "/tokenize": (text.TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (text.DetokenizeRequest, {"tokens": [97]}),
}
VALUES = (
    "1e-39", "5e-324", "-5e-324", "1e-300", "1e308", "-1e308", "1e999", "-0.0", "0", "-1", "1",
    "NaN", "Infinity", "-Infinity", str(2**31), str(2**63), str(2**64), str(-(2**63) - 1),
    "3.0", "1e0", "3.5", "true", '"3"', "[]", "9" * 400, "9" * 5000,
)  # fmt: skip
OF_ONE_ROUTE = {"prompt", "input", "inputs", "tokens"}
"""Fields whose numbers are token ids of that route's prompt."""
LENGTH = 32
"""Tokens of the context."""
IGNORED = {"lora_int_id", "stream_interval", "replica"}  # the last one is a name, not an amount


def numbers(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The fields of a body that hold a number, each as a template of JSON with it."""
    found: dict[str, str] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = set(_parts(hint))
        if name in OF_ONE_ROUTE or name in IGNORED:
            continue
        if int in parts or float in parts:
            shape = '{"5": %s}' if dict in parts else "[%s]" if list in parts else "%s"
            found[name] = shape
    return found


def _parts(hint: Any) -> typing.Iterator[Any]:
    yield typing.get_origin(hint) or hint
    for each in typing.get_args(hint):
        yield from _parts(each)


CASES = [
    (path, name, shape)
    for path, (kind, _) in ROUTES.items()
    for name, shape in numbers(kind).items()
]


def body_with(path: str, name: str, value: str) -> bytes:
    """The body of a route with this JSON as the value of a field."""
    body = dict(ROUTES[path][1])
    body.pop(name, None)
    if name in ("top_logprobs", "logprob_token_ids") and "completions" in path:
        body["logprobs"] = True if "chat" in path else 1
    if name not in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if "completions" in path:
            body["max_tokens"] = 3
        if path == "/v1/responses":
            body["max_output_tokens"] = 3
    return (json.dumps(body)[:-1] + f', "{name}": {value}}}').encode()


def test_the_walk_sees_every_route_and_field() -> None:
    given = [each.operation.body for each in all_routes()]
    bodies = {
        kind
        for each in given
        for kind in (each if isinstance(each, tuple) else [each])
        if isinstance(kind, type)
    }
    walked = {kind for kind, _ in ROUTES.values()}
    assert [kind.__name__ for kind in bodies - walked if numbers(kind)] == []
    names = {name for _, name, _ in CASES}
    assert set(BOUNDS) - names == {"token_id", "budget_tokens", "lifetime_s"}
    for kind in walked:
        for name in numbers(kind):
            alias = name.removeprefix("max_completion_").removeprefix("max_output_")
            alias = {"tokens": "max_tokens"}.get(alias, alias)
            alias = alias.removeprefix("top_") if alias == "top_logprobs" else alias
            is_known = alias in BOUNDS or name in ("prompt_logprobs",)
            assert is_known or name.endswith("token_ids"), name


def test_messages_has_the_fields_of_all_that_generate() -> None:
    of_all = typing.get_type_hints(GeneratingFields, include_extras=True)
    own = typing.get_type_hints(messages.MessagesRequest, include_extras=True)
    assert {name: own.get(name) for name in of_all} == of_all


@pytest.mark.parametrize("kind", ["generates", "pools"])
async def test_no_number_ends_in_a_5xx(make_server: MakeServer, kind: str) -> None:
    """And what one route refuses, its neighbours refuse, as `SamplingParams` does."""
    verdicts: dict[tuple[str, str], dict[str, int]] = {}
    async with make_server(max_model_len=LENGTH) as served:
        if kind == "pools":
            served.state.pooler = LetterPooler()
        for path, name, shape in CASES:
            pools = issubclass(ROUTES[path][0], pooling.PoolingFields | pooling.TEIFields)
            if pools != (kind == "pools"):
                continue
            decoder, is_refused = msgspec.json.Decoder(ROUTES[path][0]), False
            for value in VALUES:
                content, status = body_with(path, name, shape % value), 400
                error = _refusal(content, decoder)
                if error is None or not is_refused:  # sent: all that decode, and one that does not
                    is_refused = is_refused or error is not None
                    response = await served.client.post(path, content=content, headers=JSON)
                    status = response.status_code
                    assert status in ((200, 400) if error is None else (400,)), response.text
                    if status == 400:
                        error = InvalidRequestError(response.json()["error"]["message"])
                if error is not None and "Infinity" not in value and value != "NaN":
                    assert name.partition("_")[0] in error.message, error
                verdicts.setdefault((name, value), {})[path] = status
    for (name, value), found in verdicts.items():
        if name == "max_tokens":
            del found["/v1/completions"]  # where 0 scores the prompt
        assert len(set(found.values())) <= 1, (name, value, found)
        if name in SamplingParams.__slots__ and name != "thinking_token_budget":  # without thoughts
            assert set(found.values()) <= {_of_python(name, value)}, (name, value, found)


def _refusal(content: bytes, decoder: msgspec.json.Decoder[Any]) -> InvalidRequestError | None:
    """Why a body is not even decoded; None where it is."""
    try:
        decode(content, decoder)
    except InvalidRequestError as error:
        return error
    return None


def _of_python(name: str, value: str) -> int:
    """The verdict of `SamplingParams`, and of a model with 259 tokens and `LENGTH` of context."""
    try:
        given = json.loads(value)
    except ValueError:  # longer than Python reads
        return 400
    if value in ("NaN", "Infinity", "-Infinity"):
        return 400
    if name == "logit_bias":
        given = {5: given}
    if name.endswith("token_ids"):
        given = [given]
    try:
        params = SamplingParams(**{"max_tokens": 3, name: given})
        params.check_vocab(259)
    except InvalidRequestError:
        return 400
    top = {"truncate_prompt_tokens": LENGTH, "prompt_logprobs": 20, "logprobs": 20}.get(name)
    least = {"prompt_logprobs": 0, "logprobs": 0, "priority": 0}.get(name)
    number = getattr(params, name)
    outside = (top is not None and number > top) or (least is not None and number < least)
    return 400 if outside else 200


async def test_a_bound_of_one_route_is_its_neighbours(served: Served) -> None:
    for path, name, value in (
        ("/v1/responses", "top_logprobs", "1000000"),
        ("/v1/responses", "top_logprobs", "21"),
        ("/v1/embeddings", "truncate_prompt_tokens", "5000"),
        ("/v1/rerank", "truncate_prompt_tokens", "513"),
        ("/v1/completions", "truncate_prompt_tokens", "513"),
    ):
        served.state.pooler = LetterPooler()
        content = body_with(path, name, value)
        response = await served.client.post(path, content=content, headers=JSON)
        assert response.status_code == 400, (path, name)
        assert response.json()["error"]["param"] == name


async def test_top_p_0_is_greedy(served: Served) -> None:
    greedy = await served.complete("ab", max_tokens=8, temperature=0)
    for fields in ({"top_p": 0}, {"top_p": 0.0, "temperature": 2}, {"temperature": 1e-300}):
        for seed in (1, 2):
            found = await served.complete("ab", max_tokens=8, seed=seed, **fields)
            assert found["choices"][0]["text"] == greedy["choices"][0]["text"], fields


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": 3.0}', b'{"a": 3}'),
        (b'{"a":-3.000,"b":1e3,"c":2E+2,"d":-0.0}', b'{"a":-3,"b":1000,"c":200,"d":0}'),
        (b"[1.0,2.5,3.0,1e-3,12.5e1]", b"[1,2.5,3,1e-3,125]"),
        (b'{"a": "3.0", "1.0": "\\"4.0", "b": "\\\\", "c": 5.5}', None),
        (
            b'{"a": "3.0", "1.0": "\\"4.0", "b": "\\\\", "c": 5.0}',
            b'{"a": "3.0", "1.0": "\\"4.0", "b": "\\\\", "c": 5}',
        ),
        (b'{"a": 1e22, "b": 1e308, "c": 18446744073709551617000.0}', None),
        (b'["' + b"x" * 70_000 + b'", 7.0]', b'["' + b"x" * 70_000 + b'", 7]'),
        (b"[" + b"1.0, " * 30_000 + b"2.0]", b"[" + b"1, " * 30_000 + b"2]"),
        (
            b'{"a": 1.2.3, "b": 1.0.0, "c": .0, "d": 5., "g": 01.0, "h": -.0}',
            None,
        ),
        (b"[1." + b"0" * 300 + b", 4.0]", b"[1." + b"0" * 300 + b", 4]"),
    ],
)
def test_whole_floats_as_integers(text: bytes, expected: bytes | None) -> None:
    assert with_whole_numbers(text) == (text if expected is None else expected)


async def test_whole_floats_are_integers_wherever_they_are(served: Served) -> None:
    plain: dict[str, Any] = {"max_tokens": 3, "top_k": 5, "seed": 7, "n": 2, "stop_token_ids": [5]}
    floats = json.loads(json.dumps(plain), parse_int=float)
    for path, more in (
        ("/v1/completions", {"prompt": [97, 98], "logprobs": 1}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1}),
    ):
        own = json.loads(json.dumps(more), parse_int=float)
        first, second = [
            (await served.post(path, **body)).json() for body in (plain | more, floats | own)
        ]
        assert second["choices"] == first["choices"], path
    assert (await served.post("/detokenize", tokens=[97.0])).json() == {"prompt": "a"}
    long = {"prompt": "x" * 70_000, "truncate_prompt_tokens": 4.0, "max_tokens": 1.0}
    assert (await served.post("/v1/completions", **long)).status_code == 200
    thinking = {"type": "enabled", "budget_tokens": 1024.0}
    body = {"messages": HELLO, "max_tokens": 2048.0, "thinking": thinking}
    assert (await served.client.post("/v1/messages", json=body)).status_code == 200
    served.state.pooler = LetterPooler()
    body = {"input": [[97.0, 98.0]], "dimensions": 2.0}
    assert (await served.client.post("/v1/embeddings", json=body)).status_code == 200
    schema = {"type": "array", "items": {"const": 7}, "minItems": 2.0, "maxItems": 2.0}
    found = await served.complete("a", max_tokens=9, structured_outputs={"json": schema})
    assert json.loads(found["choices"][0]["text"]) == [7, 7]
    for wrong in (3.5, 1e-39, "3", True, [3]):
        response = await served.post("/v1/completions", prompt="a", max_tokens=wrong)
        assert response.json()["error"]["param"] == "max_tokens"


EXTREMES: dict[str, list[float]] = {
    "repetition_penalty": [1e-6, 1.0, 100.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "temperature": [0.0, 1e-5, 100.0],
    "top_p": [0.0, 1e-6, 1.0],
    "min_p": [0.0, 1.0],
}


async def test_extremes_together_are_finite(make_server: MakeServer) -> None:
    """Over the widest logits that a model has, some of them forbidden."""
    async with make_server() as served:
        random = np.random.default_rng(0)
        for _ in range(60):
            fields = {name: float(random.choice(values)) for name, values in EXTREMES.items()}
            bias = {str(token): float(random.choice([-100, 100])) for token in range(97, 105)}
            await served.complete(
                "abab", max_tokens=6, logit_bias=bias, bad_words=["a"], seed=1, logprobs=1, **fields
            )


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["abc"]}, "bad_words": ["b"]},
        {"structured_outputs": {"choice": ["abc"]}, "bad_words": ["abc"]},
        {"structured_outputs": {"regex": "[ab]{4}"}, "bad_words": ["a", "b"]},
        {"allowed_token_ids": [97, 98], "bad_words": ["aa", "ab", "ba", "bb"]},
        {"allowed_token_ids": [97], "bad_words": ["aaa"]},
        {"allowed_token_ids": [97], "stop_token_ids": [97], "min_tokens": 2},
    ],
)
async def test_what_forbids_all_tokens_is_the_clients(
    served: Served, fields: dict[str, Any]
) -> None:
    response = await served.post("/v1/completions", prompt="x", max_tokens=8, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] in ("invalid_request", "invalid_grammar")


async def test_numbers_of_queries_have_the_bounds_of_the_document(served: Served) -> None:
    paths = (await served.client.get("/openapi.json")).json()["paths"]
    found = [
        (path, query["name"], query["schema"])
        for path, item in paths.items()
        for query in item.get("get", {}).get("parameters", ())
        if query["schema"].get("type") == "integer"
    ]
    assert {name for _, name, _ in found} == {"limit", "starting_after"}
    for path, name, schema in found:
        low, high = schema["minimum"], schema["maximum"]
        missing = 404 if "{" in path else 200  # nothing has the id "x"
        for value in (low, high, low - 1, high + 1, "1e0", "1.5", "NaN", "", "٣", "9" * 5000):
            url = path.replace("{id}", "x")
            response = await served.client.get(url, params={name: str(value)})
            is_inside = isinstance(value, int) and low <= value <= high
            assert response.status_code in ({missing} if is_inside else {400, 404}), (path, value)
            if response.status_code == 400 and not path.startswith("/v1/messages"):
                assert response.json()["error"]["param"] == name
