"""A body whose inputs a model turns into vectors or scores: what every route of them asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_engine.client.chat import ChatOptions
from vllmx_engine.client.pooling import PoolingText, first_tokens, first_values

from vllmx_server.generating.chat_call import check_template, prompt_tokens
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.generation import Usage
from vllmx_server.generating.pooling import F32, Pooled, Pooler, PoolingOptions, Task, pooler_for
from vllmx_server.generating.reading import CheckedBody, body_bytes, caller_of, checked, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.limits.admitted import BYTES_OF_TOKEN
from vllmx_server.watch.tracing import trace_of


class PoolingBody(CheckedBody, Protocol):
    """A body with inputs. Its `dimensions`, `add_special_tokens` and `prompt_name`, or `prompt_of`
    the names of the model's prompts, are heeded where it has them; where its `task` is not None,
    that is the task."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """The number of first tokens that are taken of longer inputs; -1: what the model takes."""

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def is_normalized(self) -> bool:
        """Vectors have length 1, scores go through the model's activation."""

    def pooling_texts(self) -> list[PoolingText]:
        """The inputs; none for a conversation, which the body then has."""


class Conversation(Protocol):
    """A conversation as a body's one input."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def add_special_tokens(self) -> bool | None: ...

    def conversation(self) -> list[dict[str, Any]]: ...

    def chat_options(self) -> ChatOptions: ...


Body = TypeVar("Body", bound=PoolingBody)


async def pool_body(
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
        wanted: Task = getattr(body, "task", None) or task
        pooler = pooler_for(wanted, served.pooler, served.llm.config.name)
        _check_dimensions(getattr(body, "dimensions", None), pooler)
        return body, wanted, body.pooling_texts()

    served.check_admission()
    body, wanted, inputs = await read_json(request, served, parse)
    if not inputs:
        inputs = await _written(request, served, cast(Conversation, body))
    options = PoolingOptions(
        getattr(body, "add_special_tokens", None) is not False,
        first_tokens(body.truncate_prompt_tokens, served.llm.info.max_model_len),
        body.is_normalized,
        caller_of(request, body),
        _prompt_name(served, body),
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


async def _written(request: Request, served: Served, body: Conversation) -> list[PoolingText]:
    """The conversation of a body as the chat template writes it. Raises TemplateError,
    InvalidRequestError."""
    check_template(served, body.chat_template)
    client, size = client_of(request), body_bytes(request)
    conversation = await served.llm.text.run(client, size, lambda _: body.conversation())
    special = bool(body.add_special_tokens)
    ids = await prompt_tokens(request, served, conversation, body.chat_options(), special)
    return [PoolingText(ids=ids)]


def _prompt_name(served: Served, body: object) -> str | None:
    prompt_of, pooling = getattr(body, "prompt_of", None), served.llm.info.pooling
    if prompt_of is None or pooling is None:
        return getattr(body, "prompt_name", None)
    return cast(str | None, prompt_of(pooling.prompts))


def _check_dimensions(dimensions: int | None, pooler: Pooler) -> None:
    """Raises InvalidRequestError for more dimensions than the model's vectors have."""
    if dimensions is not None and dimensions > pooler.dimensions:
        raise field_error(
            "dimensions", f"must be between 1 and the model's {pooler.dimensions}, got {dimensions}"
        )


def shortened(values: F32, dimensions: int | None, *, normalize: bool) -> F32:
    """The first values of a vector, or of each of several, of length 1 again where they had it."""
    if dimensions is None or dimensions >= values.shape[-1]:
        return values
    return first_values(values, dimensions, normalize=normalize)


def best_first(pooled: Sequence[Pooled]) -> list[tuple[int, float]]:
    """(place in the request, score), the best first."""
    scores = np.array([each.values[0] for each in pooled])
    order = np.argsort(-scores, kind="stable")
    return list(zip(order.tolist(), scores[order].tolist(), strict=True))


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
