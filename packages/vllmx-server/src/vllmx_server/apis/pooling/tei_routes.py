"""POST /embed and /rerank as text-embeddings-inference (TEI) has them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.apis.pooling import routes as pooling
from vllmx_server.apis.pooling.answers import RankedByTEI, Ranking
from vllmx_server.apis.pooling.routes import (
    RANKING,
    check_dimensions,
    in_pieces,
    pool,
    read,
    shortened,
    vectors_route,
)
from vllmx_server.apis.pooling.schema import (
    EMBED,
    RANK_TEXTS,
    EmbedRequest,
    RankTextsRequest,
    RerankRequest,
)
from vllmx_server.generating.api import Api
from vllmx_server.generating.field_names import TEI_EMBED_FIELDS, TEI_RERANK_FIELDS
from vllmx_server.generating.pooling import pooler_for
from vllmx_server.generating.reading import Endpoint, by_shape
from vllmx_server.generating.served import served_of
from vllmx_server.schema.record import Items, json_pieces


async def embed(request: Request) -> Response:
    """A vector for each input, in TEI's shape."""
    served = served_of(request)

    def prepare(body: EmbedRequest) -> list[PoolingText]:
        found = pooler_for("embed", served.pooler, served.llm.config.name)
        check_dimensions(body.dimensions, found)
        return body.texts()

    body, inputs = await read(request, served, EMBED, prepare)
    normalize = body.normalize is not False
    with TEI_EMBED_FIELDS.told():
        pooled = await pool(
            request,
            served,
            body,
            "embed",
            inputs,
            normalize=normalize,
            prompt_name=body.prompt_name,
        )
    rows = (
        shortened(each.values, body.dimensions, normalize=normalize).tolist() for each in pooled
    )
    return in_pieces(json_pieces(Items(rows)))


async def rerank(request: Request) -> Any:
    """Documents by how well they answer a query, the best first: `documents` in Jina's and Cohere's
    shape, or `texts` in TEI's."""
    return await by_shape(request, _meant)


def _meant(names: Collection[str]) -> Endpoint:
    return _rank_texts if "texts" in names and "documents" not in names else pooling.rerank


async def _rank_texts(request: Request) -> Response:
    served = served_of(request)

    def prepare(body: RankTextsRequest) -> list[PoolingText]:
        pooler_for("score", served.pooler, served.llm.config.name)
        return body.pairs()

    body, pairs = await read(request, served, RANK_TEXTS, prepare)
    with TEI_RERANK_FIELDS.told():
        pooled = await pool(request, served, body, "score", pairs, normalize=not body.raw_scores)
    scores = np.array([each.values[0] for each in pooled])
    order = np.argsort(-scores, kind="stable")

    def row(index: int) -> RankedByTEI:
        found = RankedByTEI(index=index, score=float(scores[index]))
        if body.return_text:
            found.text = body.texts[index]
        return found

    return in_pieces(json_pieces(Items(map(row, order.tolist()))))


_RERANK = (RerankRequest, RankTextsRequest)
_RANKED = (Ranking, list[RankedByTEI])
_INPUTS = {"inputs": ["a text", "another one"]}


class PoolingApi(Api):
    """Vectors and scores, in all of their shapes."""

    routes = (
        *pooling.ROUTES,
        vectors_route("/rerank", rerank, _RANKED, _RERANK, RANKING, "score", "rerank"),
        vectors_route("/embed", embed, list[list[float]], EmbedRequest, _INPUTS, "embed", None),
    )
