"""/v1/embeddings, /pooling, /classify, /v1/score, /v1/rerank, and TEI's /embed and /rerank: over a
model that makes vectors or scores instead of text."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_engine.client.pooling import PoolingText, first_tokens

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
    InputFields,
    PoolingBody,
    PoolingFields,
    PoolingRequest,
    RankTextsRequest,
    RerankRequest,
    ScoreRequest,
)
from vllmx_server.generating.answers import PoolingUsage
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.chat_call import check_template, prompt_tokens
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.generation import Usage
from vllmx_server.generating.pooling import F32, Pooled, Pooler, PoolingOptions, Task, pooler_for
from vllmx_server.generating.reading import (
    body_bytes,
    by_shape,
    caller_of,
    checked,
    read_json,
    request_id_of,
)
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.operation import GENERATES, VECTORS, Endpoint
from vllmx_server.http.operation import Task as ModelTask
from vllmx_server.http.route import Route
from vllmx_server.limits.admitted import BYTES_OF_TOKEN
from vllmx_server.schema.record import Items, json_pieces, lazily
from vllmx_server.watch.tracing import trace_of

Body = TypeVar("Body", bound=PoolingBody)


async def embeddings(request: Request) -> Response:
    """A vector for each input."""
    body, pooled = await _pool(request, EMBEDDINGS, "embed")
    vectors = enumerate(_vectors(body, pooled))
    rows = (Embedding(index=index, embedding=each) for index, each in vectors)
    return _listed(request, body, EmbeddingList, rows, pooled)


async def pooling(request: Request) -> Response:
    """The model's output for each input: a vector, or the probabilities of its classes."""
    pooler = served_of(request).pooler
    task: Task = "embed" if pooler is None or "embed" in pooler.tasks else "classify"
    body, pooled = await _pool(request, POOLING, task)
    rows = (PooledRow(index=index, data=each) for index, each in enumerate(_vectors(body, pooled)))
    return _listed(request, body, PooledList, rows, pooled)


async def classify(request: Request) -> Response:
    """The probabilities of the model's classes for each input."""
    body, pooled = await _pool(request, CLASSIFY, "classify")
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
    body, pooled = await _pool(request, SCORE, "score")
    rows = (Score(index=index, score=float(each.values[0])) for index, each in enumerate(pooled))
    return _listed(request, body, ScoreList, rows, pooled)


async def rerank_documents(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    body, pooled = await _pool(request, RERANK, "score", FieldNames({"input": "documents"}))
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
        results=lazily(row(*each) for each in _best_first(pooled)[: body.top_n or None]),
    )
    return _in_pieces(json_pieces(answer))


async def embed(request: Request) -> Response:
    """A vector for each input, in TEI's shape."""
    body, pooled = await _pool(request, EMBED, "embed", FieldNames({"input": "inputs"}))
    return _in_pieces(json_pieces(Items(_vectors(body, pooled))))


async def rerank_texts(request: Request) -> Response:
    """Texts by how well they answer a query, in TEI's shape."""
    body, pooled = await _pool(request, RANK_TEXTS, "score", FieldNames({"input": "texts"}))

    def row(index: int, score: float) -> RankedByTEI:
        found = RankedByTEI(index=index, score=score)
        if body.return_text:
            found.text = body.texts[index]
        return found

    return _in_pieces(json_pieces(Items(row(*each) for each in _best_first(pooled))))


async def rerank(request: Request) -> Any:
    """Documents by how well they answer a query, the best first: `documents` in Jina's and Cohere's
    shape, or `texts` in TEI's."""
    return await by_shape(request, _reranking)


def _reranking(names: Collection[str]) -> Endpoint:
    return rerank_texts if "texts" in names and "documents" not in names else rerank_documents


# --- from the body to what the model makes of it --------------------------------------------------
async def _pool(
    request: Request,
    decoder: msgspec.json.Decoder[Body],
    task: Task,
    names: FieldNames | None = None,
) -> tuple[Body, list[Pooled]]:
    """The checked body and a result for each of its inputs, counted for the key of the request.
    `names`: what the route calls fields in messages."""
    served = served_of(request)

    def parse(data: bytes) -> tuple[Body, Task, list[PoolingText]]:
        body = checked(data, served, decoder)
        wanted = body.task or task if isinstance(body, PoolingRequest) else task
        pooler = pooler_for(wanted, served.pooler, served.llm.config.name)
        if isinstance(body, EmbeddingsRequest | EmbedRequest):
            _check_dimensions(body.dimensions, pooler)
        return body, wanted, body.pooling_texts()

    served.check_admission()
    body, wanted, inputs = await read_json(request, served, parse)
    if not inputs and isinstance(body, InputFields):
        inputs = await _written(request, served, body)
    options = PoolingOptions(
        getattr(body, "add_special_tokens", None) is not False,
        first_tokens(body.truncate_prompt_tokens, served.llm.info.max_model_len),
        body.is_normalized,
        caller_of(request, body),
        getattr(body, "prompt_name", None),
    )
    with (names or FieldNames({})).told():
        return body, await _pooled(request, served, wanted, inputs, options)


async def _pooled(
    request: Request, served: Served, task: Task, inputs: list[PoolingText], options: PoolingOptions
) -> list[Pooled]:
    started_s = time.monotonic()
    pooler = pooler_for(task, served.pooler, served.llm.config.name)
    release = await served.admit(request, body_bytes(request) // BYTES_OF_TOKEN)
    try:
        pooling = pooler.pool(task, inputs, options)
        found = await while_there(request.receive, pooling, deadline_of(request, served.config))
        release.usage = Usage(sum(each.num_tokens for each in found))
    finally:
        release()
    texts = [text for each in found for text in each.texts]
    seconds = time.monotonic() - started_s
    for text in texts:
        served.metrics.finish_pooled(text.metrics, text.num_tokens, seconds)
    if (trace := trace_of(request)) is not None:
        trace.texts = texts
    return found


async def _written(request: Request, served: Served, body: InputFields) -> list[PoolingText]:
    """The conversation of a body as the chat template writes it. Raises TemplateError,
    InvalidRequestError."""
    check_template(served, body.chat_template)
    client, size = client_of(request), body_bytes(request)
    conversation = await served.llm.text.run(client, size, lambda _: body.conversation())
    special = bool(body.add_special_tokens)
    ids = await prompt_tokens(request, served, conversation, body.chat_options(), special)
    return [PoolingText(ids=ids)]


def _check_dimensions(dimensions: int | None, pooler: Pooler) -> None:
    """Raises InvalidRequestError for more dimensions than the model's vectors have."""
    if dimensions is not None and dimensions > pooler.dimensions:
        raise field_error(
            "dimensions", f"must be between 1 and the model's {pooler.dimensions}, got {dimensions}"
        )


# --- answers --------------------------------------------------------------------------------------
def _vectors(
    body: EmbeddingsRequest | EmbedRequest, pooled: Iterable[Pooled]
) -> Iterator[list[float] | str]:
    """Each vector as numbers, or as base64 of 32-bit floats."""
    for each in pooled:
        values = _shortened(each.values, body.dimensions, normalize=body.is_normalized)
        if isinstance(body, EmbeddingsRequest) and body.encoding_format == "base64":
            yield base64.b64encode(values.astype("<f4").tobytes()).decode()
        else:
            yield values.tolist()


def _shortened(values: F32, dimensions: int | None, *, normalize: bool) -> F32:
    """(dimensions,) the first values of a vector, scaled to length 1 again where it had that."""
    if dimensions is None or dimensions >= len(values):
        return values
    cut = values[:dimensions]
    length = float(np.linalg.norm(cut)) if normalize else 0.0
    return cut / np.float32(length) if length else cut


def _best_first(pooled: Sequence[Pooled]) -> list[tuple[int, float]]:
    """(place in the request, score), the best first."""
    scores = np.array([each.values[0] for each in pooled])
    order = np.argsort(-scores, kind="stable")
    return list(zip(order.tolist(), scores[order].tolist(), strict=True))


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
    return _in_pieces(json_pieces(answer))


def _in_pieces(pieces: Iterator[bytes]) -> Response:
    """A small answer as a whole; of a large one a piece at a time, others in between."""
    first, second = next(pieces), next(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        yield second
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    return StreamingResponse(all_pieces(), media_type="application/json")


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
