"""/v1/embeddings, /pooling, /classify, /v1/score, /v1/rerank, and TEI's /embed and /rerank: over a
model that makes vectors or scores instead of text."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.apis.pooling.answers import (
    Classified,
    ClassifiedList,
    Embedding,
    EmbeddingList,
    PooledList,
    PooledRow,
    PoolingList,
    Ranked,
    RankedByTEI,
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from vllmx_server.apis.pooling.schema import (
    CLASSIFY,
    EMBED,
    EMBEDDINGS,
    POOLING,
    RANK_TEXTS,
    RERANK,
    SCORE,
    ClassifyRequest,
    EmbeddingsRequest,
    EmbedRequest,
    PoolingFields,
    PoolingRequest,
    RankTextsRequest,
    RerankRequest,
    ScoreRequest,
)
from vllmx_server.generating.answers import PoolingUsage
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.pooling import Pooled, Task
from vllmx_server.generating.pooling_call import best_first, in_pieces, pool_body, shortened
from vllmx_server.generating.reading import by_shape, request_id_of
from vllmx_server.generating.served import served_of
from vllmx_server.http.operation import GENERATES, VECTORS, Endpoint
from vllmx_server.http.operation import Task as ModelTask
from vllmx_server.http.route import Route
from vllmx_server.schema.record import Items, json_pieces, lazily


async def embeddings(request: Request) -> Response:
    """A vector for each input."""
    body, pooled = await pool_body(request, EMBEDDINGS, "embed")
    vectors = enumerate(_vectors(body, pooled))
    rows = (Embedding(index=index, embedding=each) for index, each in vectors)
    return _listed(request, body, EmbeddingList, rows, pooled)


async def pooling(request: Request) -> Response:
    """The model's output for each input: a vector, those of its tokens, or the probabilities of its
    classes."""
    pooler = served_of(request).pooler
    made: tuple[Task, ...] = ("embed", "token_embed", "classify")
    task = next((each for each in made if pooler is None or each in pooler.tasks), made[-1])
    body, pooled = await pool_body(request, POOLING, task)
    rows = (PooledRow(index=index, data=each) for index, each in enumerate(_vectors(body, pooled)))
    return _listed(request, body, PooledList, rows, pooled)


async def classify(request: Request) -> Response:
    """The probabilities of the model's classes for each input."""
    body, pooled = await pool_body(request, CLASSIFY, "classify")
    pooler = served_of(request).pooler
    assert pooler is not None
    labels = pooler.labels

    def row(index: int, each: Pooled) -> Classified:
        best = int(each.values.argmax())
        label = labels[best] if best < len(labels) else str(best)
        probs = each.values.tolist()
        return Classified(index=index, label=label, probs=probs, num_classes=len(probs))

    rows = (row(index, each) for index, each in enumerate(pooled))
    return _listed(request, body, ClassifiedList, rows, pooled)


async def score(request: Request) -> Response:
    """Scores of how well texts belong together."""
    body, pooled = await pool_body(request, SCORE, "score")
    rows = (Score(index=index, score=float(each.values[0])) for index, each in enumerate(pooled))
    return _listed(request, body, ScoreList, rows, pooled)


async def rerank_documents(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    body, pooled = await pool_body(request, RERANK, "score", FieldNames({"input": "documents"}))
    texts = body.texts()

    def row(index: int, score: float) -> Ranked:
        found = Ranked(index=index, relevance_score=score)
        if body.return_documents is not False:
            found.document = RankedText(text=texts[index])
        return found

    answer = Ranking(
        id=f"rerank-{request_id_of(request, body)}",
        model=served_of(request).llm.config.name,
        usage=_usage(pooled),
        results=lazily(row(*each) for each in best_first(pooled)[: body.top_n or None]),
    )
    return in_pieces(json_pieces(answer))


async def embed(request: Request) -> Response:
    """A vector for each input, in TEI's shape."""
    body, pooled = await pool_body(request, EMBED, "embed", FieldNames({"input": "inputs"}))
    return in_pieces(json_pieces(Items(_vectors(body, pooled))))


async def rerank_texts(request: Request) -> Response:
    """Texts by how well they answer a query, in TEI's shape."""
    body, pooled = await pool_body(request, RANK_TEXTS, "score", FieldNames({"input": "texts"}))

    def row(index: int, score: float) -> RankedByTEI:
        found = RankedByTEI(index=index, score=score)
        if body.return_text:
            found.text = body.texts[index]
        return found

    return in_pieces(json_pieces(Items(row(*each) for each in best_first(pooled))))


async def rerank(request: Request) -> Any:
    """Documents by how well they answer a query, the best first: `documents` in Jina's and Cohere's
    shape, or `texts` in TEI's."""
    return await by_shape(request, _reranking)


def _reranking(names: Collection[str]) -> Endpoint:
    return rerank_texts if "texts" in names and "documents" not in names else rerank_documents


# --- answers --------------------------------------------------------------------------------------
def _vectors(body: EmbeddingsRequest | EmbedRequest, pooled: Iterable[Pooled]) -> Iterator[Any]:
    """Each vector, or vectors of tokens, as numbers, or as base64 of 32-bit floats."""
    for each in pooled:
        values = shortened(each.values, body.dimensions, normalize=body.is_normalized)
        if isinstance(body, EmbeddingsRequest) and body.encoding_format == "base64":
            yield base64.b64encode(values.astype("<f4").tobytes()).decode()
        elif values.ndim > 1:
            yield lazily(map(np.ndarray.tolist, values))
        else:
            yield values.tolist()


def _usage(pooled: Sequence[Pooled]) -> PoolingUsage:
    tokens = sum(each.num_tokens for each in pooled)
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def _listed(
    request: Request,
    body: PoolingFields,
    kind: Callable[..., PoolingList],
    rows: Iterator[Any],
    pooled: Sequence[Pooled],
) -> Response:
    answer = kind(
        id=f"pool-{request_id_of(request, body)}",
        created=int(time.time()),
        model=served_of(request).llm.config.name,
        data=lazily(rows),
        usage=_usage(pooled),
    )
    return in_pieces(json_pieces(answer))


def _route(
    path: str,
    endpoint: Endpoint,
    answer: Any,
    body: Any,
    example: dict[str, Any],
    task: ModelTask,
    span: str | None,
) -> Route:
    return keyed(
        "POST",
        path,
        endpoint,
        VECTORS,
        answer,
        body,
        text="Of models that make vectors or scores; one that generates text answers 400.",
        statuses=GENERATES,
        example=example,
        task=task,
        of_model=True,
        span=span,
    )


_INPUT = {"input": ["a text", "another one"]}
_INPUTS = {"inputs": ["a text", "another one"]}
_PAIR = {"text_1": "a question", "text_2": ["an answer", "another one"]}
_RANKING = {"query": "a question", "documents": ["an answer", "another one"]}
_BODIES = (RerankRequest, RankTextsRequest)
_RANKINGS = (Ranking, list[RankedByTEI])


class PoolingApi(Api):
    """Vectors and scores, in all of their shapes."""

    routes = (
        _route(
            "/v1/embeddings",
            embeddings,
            EmbeddingList,
            EmbeddingsRequest,
            _INPUT,
            "embed",
            "embeddings",
        ),
        _route("/v1/rerank", rerank_documents, Ranking, RerankRequest, _RANKING, "score", "rerank"),
        _route("/v2/rerank", rerank_documents, Ranking, RerankRequest, _RANKING, "score", "rerank"),
        _route("/v1/score", score, ScoreList, ScoreRequest, _PAIR, "score", "score"),
        _route("/score", score, ScoreList, ScoreRequest, _PAIR, "score", "score"),
        _route(
            "/classify", classify, ClassifiedList, ClassifyRequest, _INPUT, "classify", "classify"
        ),
        _route("/pooling", pooling, PooledList, PoolingRequest, _INPUT, "pool", "embeddings"),
        _route("/rerank", rerank, _RANKINGS, _BODIES, _RANKING, "score", "rerank"),
        _route("/embed", embed, list[list[float]], EmbedRequest, _INPUTS, "embed", None),
    )
