"""POST /, /predict, /tokenize, /decode, GET /info, and the shape of TEI's errors."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import InvalidRequestError, VllmxError

from vllmx_server import __version__
from vllmx_server.apis.tei.schema import (
    DECODE,
    MAX_INPUTS,
    PREDICT,
    TOKENIZE,
    DecodeRequest,
    PredictRequest,
    TokenizeRequest,
)
from vllmx_server.errors import cut_message, route_path
from vllmx_server.generating.api import Api, keyed, posted
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.pooling import Pooled
from vllmx_server.generating.pooling_call import in_pieces, pool_body
from vllmx_server.generating.reading import check_ids, checked, counted, most_tokens, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.operation import JSON, STATUS, TEXT, VECTORS
from vllmx_server.http.pages import answer
from vllmx_server.schema.record import Items, encode, json_pieces

_TYPES = {429: "Overloaded", 500: "Backend", 503: "Overloaded", 504: "Backend"}
_NAMES = FieldNames({"input": "inputs", "tokens": "ids"})


def error_body(error: VllmxError) -> bytes:
    """JSON of one error as TEI has it."""
    kind = _TYPES.get(error.http_status, "Validation")
    return encode({"error": cut_message(error), "error_type": kind})


async def predict(request: Request) -> Response:
    """The classes of each input, the likeliest first."""
    body, pooled = await pool_body(request, PREDICT, "classify", _NAMES)
    pooler = served_of(request).pooler
    assert pooler is not None
    labels = pooler.labels

    def classes(each: Pooled) -> list[dict[str, Any]]:
        order = (-each.values).argsort(kind="stable").tolist()
        return [{"score": float(each.values[index]), "label": labels[index]} for index in order]

    found = (classes(each) for each in pooled)
    return in_pieces(json_pieces(Items(found) if body.is_batch else next(found)))


async def by_model(request: Request) -> Any:
    """The answer of /embed, /rerank or /predict, whichever the model is for."""
    served = served_of(request)
    tasks = frozenset() if served.pooler is None else served.pooler.tasks
    path = "/embed" if "embed" in tasks else "/rerank" if "score" in tasks else "/predict"
    endpoints = {each.path: each.endpoint for each in served.routes if each.method == "POST"}
    return await endpoints[path](request)


async def tokenize(request: Request) -> Response:
    """The tokens of each text."""
    served, client = served_of(request), client_of(request)
    body = await read_json(request, served, lambda data: checked(data, served, TOKENIZE))
    async with counted(request) as admitted:
        found = await while_there(request.receive, _encoded(served, body, client))
        admitted.num_tokens = sum(map(len, found))

    def made(_: object) -> bytes:
        rows = (Items(_token(served, each) for each in ids) for ids in found)
        return b"".join(json_pieces(Items(rows)))

    data = await served.llm.text.run(client, admitted.num_tokens, made)
    return Response(data, media_type="application/json")


async def _encoded(served: Served, body: TokenizeRequest, client: str) -> list[list[int]]:
    """The ids of each text. Raises InvalidRequestError where all have too many."""
    found: list[list[int]] = []
    left, special = most_tokens(served), body.add_special_tokens
    for text in [body.inputs] if isinstance(body.inputs, str) else body.inputs:
        found.append(await served.llm.encode(text, special, client=client, limit=max(1, left)))
        left -= len(found[-1])
    return found


def _token(served: Served, token: int) -> dict[str, Any]:
    tokenizer = served.llm.tokenizer
    text, special = tokenizer.token_text(token), token in tokenizer.special_ids
    return {"id": token, "text": text, "special": special, "start": None, "stop": None}


async def decode(request: Request) -> Response:
    """The text of token ids, or of each list of them."""
    served, client = served_of(request), client_of(request)

    def parse(data: bytes) -> tuple[DecodeRequest, list[list[int]]]:
        body = checked(data, served, DECODE)
        texts = body.texts()
        for ids in texts:
            check_ids(ids, served.llm.info.vocab_size)
        return body, texts

    with _NAMES.told():
        body, texts = await read_json(request, served, parse)
    found = []
    async with counted(request) as admitted:
        for ids in texts:
            special = body.skip_special_tokens
            found.append(await served.llm.decode(ids, special, client=client))
        admitted.num_tokens = sum(map(len, texts))
    return in_pieces(json_pieces(Items(found)))


async def info(request: Request) -> Response:
    """The model and its limits."""
    served = served_of(request)
    about, config, pooler = served.llm.info, served.config, served.pooler
    kind: dict[str, Any] = {}
    if pooler is not None and "embed" in pooler.tasks:
        kind = {"embedding": {}}
    elif pooler is not None:
        labels = {str(index): each for index, each in enumerate(pooler.labels)}
        name = "reranker" if "score" in pooler.tasks else "classifier"
        kind = {name: {"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}}
    found = {
        "model_id": (await served.infos())[0].root,
        "model_sha": None,
        "model_dtype": about.dtype,
        "model_type": kind or None,
        "served_model_name": served.llm.config.name,
        "max_concurrent_requests": config.max_concurrent_requests,
        "max_input_length": about.max_model_len,
        "max_batch_tokens": about.max_num_batched_tokens,
        "max_batch_requests": about.max_num_seqs,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "version": __version__,
    }
    return answer(found)


async def refused(request: Request) -> Response:
    """Says that a vector for each token, or a sparse one, is not served."""
    raise InvalidRequestError(
        f"{route_path(request.scope)} is not served: texts get one dense vector each; use /embed"
    )


class TEIApi(Api):
    routes = (
        posted("/", by_model, VECTORS, PredictRequest, "pool"),
        posted("/predict", predict, VECTORS, PredictRequest, "classify", span="classify"),
        posted("/embed_all", refused, VECTORS, None),
        posted("/embed_sparse", refused, VECTORS, None),
        posted("/tokenize", tokenize, TEXT, TokenizeRequest),
        posted("/decode", decode, TEXT, DecodeRequest),
        keyed("GET", "/info", info, STATUS, JSON),
    )
    error_shapes = tuple(
        (path, error_body) for path in ("/embed", "/rerank", *(route.path for route in routes))
    )
