"""POST /v1/embed, /v2/embed and /v2/rerank."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import VllmxError
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.errors import cut_message, route_path
from vllmx_server.generating.api import Api, posted
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.pooling import F32, Pooled
from vllmx_server.generating.pooling_call import best_first, in_pieces, pool_body, shortened
from vllmx_server.http.operation import VECTORS
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.record import Items, encode, json_pieces

_OLD = "/v1/embed"
Texts = Annotated[list[str], Meta(min_length=1, max_length=2048)]
Coding = Literal["float", "base64", "binary", "ubinary"]
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""The names that models have for the prompt of an `input_type`."""


class EmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    texts: Texts
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    """Chooses the model's prompt of that purpose, if it has one."""
    embedding_types: Annotated[list[Coding], Meta(min_length=1)] | None = None
    output_dimension: limits.Dimensions | None = None
    truncate: Literal["NONE", "END"] = "END"
    """"END" cuts texts that are too long for the model, "NONE" refuses them."""
    priority: limits.Priority | None = None

    cache_salt = None  # Cohere has none
    is_normalized = True

    @property
    def dimensions(self) -> int | None:
        return self.output_dimension

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate == "END" else None

    def check(self) -> None:
        """Nothing depends on another field."""

    def pooling_texts(self) -> list[PoolingText]:
        return [PoolingText(text) for text in self.texts]

    def prompt_of(self, prompts: Collection[str]) -> str | None:
        """The name of the prompt that is written before each text; None: the model's default."""
        known = _PROMPTS.get(self.input_type or "", (self.input_type,))
        return next((name for name in known if name in prompts), None)


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    query: str
    documents: Texts
    top_n: limits.TopN | None = None
    priority: limits.Priority | None = None

    cache_salt = None
    is_normalized = True
    truncate_prompt_tokens = -1

    def check(self) -> None:
        """Nothing depends on another field."""

    def pooling_texts(self) -> list[PoolingText]:
        return [PoolingText(self.query, pair=text) for text in self.documents]


_EMBED = msgspec.json.Decoder(EmbedRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)
_NAMES = FieldNames({"input": "texts", "dimensions": "output_dimension"})


def error_body(error: VllmxError) -> bytes:
    """JSON of one error as Cohere has it."""
    return encode({"message": cut_message(error)})


async def embed(request: Request) -> Response:
    """A vector for each text, in each of the wanted codings."""
    is_old = route_path(request.scope) == _OLD
    with _NAMES.told():
        body, pooled = await pool_body(request, _EMBED, "embed")
    vectors = [shortened(each.values, body.dimensions, normalize=True) for each in pooled]
    found: dict[str, Any] = {"texts": body.texts, **_about(request, "1" if is_old else "2", pooled)}
    if is_old and body.embedding_types is None:
        rows = Items(each.tolist() for each in vectors)
        found |= {"response_type": "embeddings_floats", "embeddings": rows}
    else:
        kinds = dict.fromkeys(body.embedding_types or ("float",))
        coded = {kind: Items(map(partial(_coded, kind), vectors)) for kind in kinds}
        found |= {"response_type": "embeddings_by_type", "embeddings": coded}
    return in_pieces(json_pieces(found))


def _coded(kind: Coding, vector: F32) -> Any:
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    if kind == "float":
        return vector.tolist()
    bits = np.packbits(vector > 0).astype(np.int16)  # a bit for each number, the first the highest
    return (bits if kind == "ubinary" else bits - 128).tolist()


async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    names = FieldNames({"input": "documents"})
    body, pooled = await pool_body(request, _RERANK, "score", names)
    best = best_first(pooled)[: body.top_n or None]
    rows = Items({"index": index, "relevance_score": score} for index, score in best)
    return in_pieces(json_pieces({"results": rows, **_about(request, "2", pooled)}))


def _about(request: Request, version: str, pooled: Sequence[Pooled]) -> dict[str, Any]:
    tokens = {"input_tokens": sum(each.num_tokens for each in pooled)}
    meta = {"api_version": {"version": version}, "billed_units": tokens, "tokens": tokens}
    return {"id": request.scope["state"]["request_id"], "meta": meta}


class CohereApi(Api):
    routes = (
        posted(_OLD, embed, VECTORS, EmbedRequest, "embed", span="embeddings"),
        posted("/v2/embed", embed, VECTORS, EmbedRequest, "embed", span="embeddings"),
        posted("/v2/rerank", rerank, VECTORS, RerankRequest, "score", span="rerank"),
    )
    error_shapes = tuple((route.path, error_body) for route in routes)
