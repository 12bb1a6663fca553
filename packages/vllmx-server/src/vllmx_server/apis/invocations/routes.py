"""POST /invocations: SageMaker's route, answered by the endpoint that takes such a body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError

from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.reading import Endpoint, by_shape
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.operation import GENERATES, GENERATING, HELLO

_GENERATING: Mapping[str, str] = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The routes of a model that generates, by the field that only their bodies have."""
_SCORING: Mapping[str, str] = {
    "text_1": "/v1/score",
    "queries": "/v1/score",
    "documents": "/v1/rerank",
    "texts": "/rerank",
    "inputs": "/embed",
    "task": "/pooling",
}
_INPUTS = ("input", "messages")
_EMBEDDINGS, _CLASSIFY = "/v1/embeddings", "/classify"


async def invocations(request: Request) -> Any:
    """Answers a body as the route for its shape does."""
    return await by_shape(request, partial(_endpoint, served_of(request)))


def _endpoint(served: Served, names: Collection[str]) -> Endpoint:
    """Raises InvalidRequestError for a shape that no route of the model takes."""
    known = _GENERATING
    if served.pooler is not None:
        vectors = _EMBEDDINGS if "embed" in served.pooler.tasks else _CLASSIFY
        known = {**_SCORING, **dict.fromkeys(_INPUTS, vectors)}
    endpoints = {each.path: each.endpoint for each in served.routes if each.method == "POST"}
    for name, path in known.items():
        if name in names and path in endpoints:
            return endpoints[path]
    raise InvalidRequestError(
        f"no route of this model takes a body with these fields: give {' or '.join(known)}"
    )


class InvocationsApi(Api):
    routes = (
        keyed(
            "POST",
            "/invocations",
            invocations,
            GENERATING,
            text="A model that generates takes chats and texts, one that makes vectors or"
            " scores the others. The answer is that of the route.",
            statuses=GENERATES,
            example={"messages": HELLO},
            shapes=(*_GENERATING.values(), _EMBEDDINGS, _CLASSIFY, *_SCORING.values()),
            of_model=True,
        ),
    )
