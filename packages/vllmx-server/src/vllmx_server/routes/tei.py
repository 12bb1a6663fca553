"""POST /embed and /rerank of text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.answers.pooling import RankedByTEI
from vllmx_server.json_pieces import Items, json_pieces
from vllmx_server.pooling import pooler_for
from vllmx_server.routes import pooling
from vllmx_server.routes.by_shape import Endpoint, by_shape
from vllmx_server.routes.pooling import (
    check_dimensions,
    in_pieces,
    pool,
    ranking,
    read,
    scored,
    shortened,
)
from vllmx_server.schema.tei import EMBED, RANK_TEXTS, EmbedRequest
from vllmx_server.state import state_of


async def embed(request: Request) -> Response:
    """A vector for each input, in TEI's shape."""
    state = state_of(request)

    def prepare(body: EmbedRequest) -> list[PoolingText]:
        found = pooler_for("embed", state.pooler, state.llm.config.name)
        check_dimensions(body.dimensions, found)
        return body.texts()

    body, inputs = await read(request, state, EMBED, prepare)
    normalize = body.normalize is not False
    pooled = await pool(
        request, state, body, "embed", inputs, normalize=normalize, prompt_name=body.prompt_name
    )
    rows = (
        shortened(each.values, body.dimensions, normalize=normalize).tolist() for each in pooled
    )
    return in_pieces(json_pieces(Items(rows)))


async def rerank(request: Request) -> Any:
    """Ranks `documents` (Jina's and Cohere's shape) or `texts` (TEI's) by a query, best first."""
    return await by_shape(request, _meant)


def _meant(names: Collection[str]) -> Endpoint:
    return _rank_texts if "texts" in names and "documents" not in names else pooling.rerank


async def _rank_texts(request: Request) -> Response:
    body, pooled = await scored(request, RANK_TEXTS, lambda body: not body.raw_scores)

    def row(place: tuple[int, float]) -> RankedByTEI:
        index, value = place
        found = RankedByTEI(index=index, score=value)
        if body.return_text:
            found.text = body.texts[index]
        return found

    return in_pieces(json_pieces(Items(map(row, ranking(pooled)))))
