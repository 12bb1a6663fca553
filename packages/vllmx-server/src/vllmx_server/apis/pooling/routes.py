"""POST /v1/embeddings, /pooling, /score, /rerank, /classify: over a model that makes no text."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_core.errors import InvalidRequestError
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
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from vllmx_server.apis.pooling.schema import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    ClassifyRequest,
    EmbeddingsRequest,
    InputFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    is_activated,
)
from vllmx_server.generating.answers import PoolingUsage
from vllmx_server.generating.chat_call import check_template
from vllmx_server.generating.field_names import RERANK_FIELDS
from vllmx_server.generating.generation import Usage
from vllmx_server.generating.pooling import (
    F32,
    Pooled,
    Pooler,
    PoolingOptions,
    Task,
    pooler_for,
)
from vllmx_server.generating.reading import (
    CheckedBody,
    body_bytes,
    caller_of,
    checked,
    most_tokens,
    read_json,
    request_id_of,
)
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.operation import GENERATES, VECTORS, Endpoint, Operation
from vllmx_server.http.operation import Task as ModelTask
from vllmx_server.http.route import Right, Route
from vllmx_server.limits.admitted import BYTES_OF_TOKEN
from vllmx_server.schema.record import json_pieces, lazily
from vllmx_server.watch.tracing import trace_of


class PooledBody(CheckedBody, Protocol):
    """A body that asks for vectors or scores."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def request_id(self) -> str | None: ...


Body = TypeVar("Body", bound=PooledBody)
Vectors = TypeVar("Vectors", bound=EmbeddingsRequest)


async def embeddings(request: Request) -> Response:
    """A vector for each input."""

    def row(index: int, values: list[float] | str) -> Embedding:
        return Embedding(index=index, embedding=values)

    return await _vectors(request, EMBEDDINGS, row, EmbeddingList, "embed")


async def pooling(request: Request) -> Response:
    """What the model makes of each input: a vector, or the probabilities of its classes."""

    def row(index: int, values: list[float] | str) -> PooledRow:
        return PooledRow(index=index, data=values)

    pooler = served_of(request).pooler
    task: Task = "embed" if pooler is None or "embed" in pooler.tasks else "classify"
    return await _vectors(request, POOLING, row, PooledList, task)


async def _vectors(
    request: Request,
    decoder: msgspec.json.Decoder[Vectors],
    row_of: Callable[[int, list[float] | str], Any],
    kind: Callable[..., PoolingList],
    task: Task,
) -> Response:
    served = served_of(request)
    pooler = served.pooler

    def prepare(body: Vectors) -> list[PoolingText]:
        nonlocal task
        if isinstance(body, PoolingRequest) and body.task is not None:
            task = body.task
        found = pooler_for(task, pooler, served.llm.config.name)
        check_dimensions(body.dimensions, found)
        return body.inputs()

    body, inputs = await read(request, served, decoder, prepare)
    inputs = inputs or await _written(request, served, body)
    normalize = body.normalize is not False
    special = body.add_special_tokens is not False
    pooled = await pool(request, served, body, task, inputs, special=special, normalize=normalize)

    def row(index: int, each: Pooled) -> Any:
        values = shortened(each.values, body.dimensions, normalize=normalize)
        if body.encoding_format == "base64":
            return row_of(index, base64.b64encode(values.astype("<f4").tobytes()).decode())
        return row_of(index, values.tolist())

    rows = (row(index, each) for index, each in enumerate(pooled))
    return _answer(request, served, body, kind, rows, pooled)


def check_dimensions(dimensions: int | None, pooler: Pooler) -> None:
    """Raises InvalidRequestError for more dimensions than the model's vectors have."""
    if dimensions is not None and dimensions > pooler.dimensions:
        raise InvalidRequestError(
            f"dimensions must be between 1 and the model's {pooler.dimensions}, got {dimensions}",
            param="dimensions",
        )


def shortened(values: F32, dimensions: int | None, *, normalize: bool) -> F32:
    """(dimensions,) the first of a vector's values, of length 1 again where it was."""
    if dimensions is None or dimensions >= len(values):
        return values
    cut = values[:dimensions]
    length = float(np.linalg.norm(cut)) if normalize else 0.0
    return cut / np.float32(length) if length else cut


async def classify(request: Request) -> Response:
    """The probabilities of the model's classes for each input."""
    served = served_of(request)

    def prepare(body: ClassifyRequest) -> list[PoolingText]:
        pooler_for("classify", served.pooler, served.llm.config.name)
        return body.inputs()

    body, inputs = await read(request, served, CLASSIFY, prepare)
    inputs = inputs or await _written(request, served, body)
    pooled = await pool(
        request,
        served,
        body,
        "classify",
        inputs,
        special=body.add_special_tokens is not False,
        normalize=is_activated(body),
    )
    assert served.pooler is not None
    labels = served.pooler.labels

    def row(index: int, each: Pooled) -> Classified:
        best = int(each.values.argmax())
        label = labels[best] if best < len(labels) else str(best)
        probs = each.values.tolist()
        return Classified(index=index, label=label, probs=probs, num_classes=len(probs))

    rows = (row(index, each) for index, each in enumerate(pooled))
    return _answer(request, served, body, ClassifiedList, rows, pooled)


async def score(request: Request) -> Response:
    """How well texts belong together."""
    served = served_of(request)

    def prepare(body: ScoreRequest) -> list[PoolingText]:
        pooler_for("score", served.pooler, served.llm.config.name)
        return body.pairs()

    body, pairs = await read(request, served, SCORE, prepare)
    normalize = is_activated(body)
    pooled = await pool(request, served, body, "score", pairs, normalize=normalize)
    rows = (Score(index=index, score=float(each.values[0])) for index, each in enumerate(pooled))
    return _answer(request, served, body, ScoreList, rows, pooled)


async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    served = served_of(request)

    def prepare(body: RerankRequest) -> list[PoolingText]:
        pooler_for("score", served.pooler, served.llm.config.name)
        return [PoolingText(body.query, pair=text) for text in body.texts()]

    body, pairs = await read(request, served, RERANK, prepare)
    normalize = is_activated(body)
    with RERANK_FIELDS.told():
        pooled = await pool(request, served, body, "score", pairs, normalize=normalize)
    scores = np.array([each.values[0] for each in pooled])
    order = np.argsort(-scores, kind="stable")[: body.top_n or len(pairs)]

    texts = body.texts()

    def row(index: int) -> Ranked:
        found = Ranked(index=index, relevance_score=float(scores[index]))
        if body.return_documents is not False:
            found.document = RankedText(text=texts[index])
        return found

    answer = Ranking(
        id=f"rerank-{request_id_of(request, body)}",
        model=served.llm.config.name,
        usage=_usage(pooled),
        results=lazily(map(row, order.tolist())),
    )
    return in_pieces(json_pieces(answer))


# --- what they have in common ---------------------------------------------------------------------
async def read(
    request: Request,
    served: Served,
    decoder: msgspec.json.Decoder[Body],
    prepare: Callable[[Body], list[PoolingText]],
) -> tuple[Body, list[PoolingText]]:
    """The checked body, and what `prepare` makes of it."""

    def parse(data: bytes) -> tuple[Body, list[PoolingText]]:
        body = checked(data, served, decoder)
        return body, prepare(body)

    served.check_admission()
    return await read_json(request, served, parse)


async def _written(request: Request, served: Served, body: InputFields) -> list[PoolingText]:
    """The conversation of a body as the chat template writes it. Raises TemplateError,
    InvalidRequestError."""
    check_template(served, body.chat_template)
    client, size = client_of(request), body_bytes(request)
    conversation = await served.llm.text.run(client, size, lambda _: body.conversation())
    encoding = served.llm.encode_chat(
        conversation,
        body.chat_options(),
        bool(body.add_special_tokens),
        client,
        size,
        most_tokens(served),
    )
    return [PoolingText(ids=await while_there(request.receive, encoding))]


async def pool(
    request: Request,
    served: Served,
    body: PooledBody,
    task: Task,
    inputs: list[PoolingText],
    *,
    special: bool = True,
    normalize: bool = True,
    prompt_name: str | None = None,
) -> list[Pooled]:
    """What the model makes of each input, counted for the key of the request."""
    started_s = time.monotonic()
    pooler = pooler_for(task, served.pooler, served.llm.config.name)
    caller = caller_of(request, body)
    limit = first_tokens(body.truncate_prompt_tokens, served.llm.info.max_model_len)
    options = PoolingOptions(special, limit, normalize, caller, prompt_name)
    release = await served.admit(request, body_bytes(request) // BYTES_OF_TOKEN)
    try:
        found = await while_there(
            request.receive,
            pooler.pool(task, inputs, options),
            deadline_of(request, served.config),
        )
        release.usage = Usage(sum(each.num_tokens for each in found))
        _note(request, served, started_s, found)
        return found
    finally:
        release()


def _note(request: Request, served: Served, started_s: float, pooled: Sequence[Pooled]) -> None:
    """Tells /metrics, and the trace if there is one, when things happened."""
    texts = [text for each in pooled for text in each.texts]
    seconds = time.monotonic() - started_s
    for text in texts:
        served.metrics.finish_pooled(text.metrics, text.num_tokens, seconds)
    if (trace := trace_of(request)) is not None:
        trace.texts = texts


def _usage(pooled: Sequence[Pooled]) -> PoolingUsage:
    tokens = sum(each.num_tokens for each in pooled)
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def _answer(
    request: Request,
    served: Served,
    body: PoolingFields,
    kind: Callable[..., PoolingList],
    rows: Iterator[Any],
    pooled: Sequence[Pooled],
) -> Response:
    answer = kind(
        id=f"pool-{request_id_of(request, body)}",
        created=int(time.time()),
        model=served.llm.config.name,
        data=lazily(rows),
        usage=_usage(pooled),
    )
    return in_pieces(json_pieces(answer))


def in_pieces(pieces: Iterator[bytes]) -> Response:
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


_TEXT = "Of models that make vectors or scores; one that generates text answers 400."


def vectors_route(
    path: str,
    endpoint: Endpoint,
    answer: Any,
    body: Any,
    example: Mapping[str, Any],
    task: ModelTask,
    span: str | None,
) -> Route:
    """A route that asks a model for vectors or scores."""
    operation = Operation(
        VECTORS, answer, body, _TEXT, statuses=GENERATES, example=example, task=task
    )
    return Route("POST", path, endpoint, operation, of_model=True, span=span, right=Right.HOLDERS)


_INPUT = {"input": ["a text", "another one"]}
_PAIR = {"text_1": "a question", "text_2": ["an answer", "another one"]}
RANKING = {"query": "a question", "documents": ["an answer", "another one"]}
ROUTES = (
    vectors_route(
        "/v1/embeddings",
        embeddings,
        EmbeddingList,
        EmbeddingsRequest,
        _INPUT,
        "embed",
        "embeddings",
    ),
    vectors_route("/v1/rerank", rerank, Ranking, RerankRequest, RANKING, "score", "rerank"),
    vectors_route("/v2/rerank", rerank, Ranking, RerankRequest, RANKING, "score", "rerank"),
    vectors_route("/v1/score", score, ScoreList, ScoreRequest, _PAIR, "score", "score"),
    vectors_route("/score", score, ScoreList, ScoreRequest, _PAIR, "score", "score"),
    vectors_route(
        "/classify", classify, ClassifiedList, ClassifyRequest, _INPUT, "classify", "classify"
    ),
    vectors_route("/pooling", pooling, PooledList, PoolingRequest, _INPUT, "pool", "embeddings"),
)
