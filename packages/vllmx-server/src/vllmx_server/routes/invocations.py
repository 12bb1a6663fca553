"""POST /invocations: SageMaker's route, answered by the endpoint that takes such a body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError

from vllmx_server.pooling import Pooler
from vllmx_server.routes import chat, completions, pooling, tei
from vllmx_server.routes.by_shape import Endpoint, by_shape
from vllmx_server.state import state_of

_GENERATING: Mapping[str, Endpoint] = {
    "messages": chat.chat_completions,
    "prompt": completions.completions,
}
"""The endpoints of a model that generates, by the field that only their bodies have."""
_SCORING: Mapping[str, Endpoint] = {
    "text_1": pooling.score,
    "queries": pooling.score,
    "documents": pooling.rerank,
    "texts": tei.rerank,
    "inputs": tei.embed,
    "task": pooling.pooling,
}
_INPUTS = ("input", "messages")


async def invocations(request: Request) -> Any:
    """Answers a body as the route for its shape does."""
    return await by_shape(request, partial(_meant, state_of(request).pooler))


def _meant(pooler: Pooler | None, names: Collection[str]) -> Endpoint:
    """Raises InvalidRequestError for a shape that no route of the model takes."""
    known = _GENERATING
    if pooler is not None:
        vectors = pooling.embeddings if "embed" in pooler.tasks else pooling.classify
        known = {**_SCORING, **dict.fromkeys(_INPUTS, vectors)}
    for name, endpoint in known.items():
        if name in names:
            return endpoint
    raise InvalidRequestError(
        f"no route of this model takes a body with these fields: give {' or '.join(known)}"
    )
