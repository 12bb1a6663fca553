"""Models, health, metrics, version: what operators and clients look up."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.config import DEMO_MODEL
from vllmx_core.errors import ModelNotFoundError, shown

from vllmx_server import __version__
from vllmx_server.answers.status import Health, ModelCard, ModelList, Version
from vllmx_server.metrics import CONTENT_TYPE
from vllmx_server.state import ServerState, state_of

_encode = msgspec.json.Encoder().encode


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(_encode(value), status, headers=headers, media_type="application/json")


def _card(state: ServerState) -> ModelCard:
    model, info = state.llm.config.model, state.llm.info
    return ModelCard(
        id=state.llm.config.name,
        created=state.created,
        root=info.path if model == DEMO_MODEL else model,
        max_model_len=info.max_model_len,
        permission=[],
    )


async def models(request: Request) -> Response:
    """The models that are served."""
    return _json(ModelList(data=[_card(state_of(request))]))


async def model(request: Request) -> Response:
    """One of them."""
    state = state_of(request)
    name = request.path_params["name"]
    if name != state.llm.config.name:
        raise ModelNotFoundError(
            f"model {shown(name)} is not served here; served: {state.llm.config.name}"
        )
    return _json(_card(state))


async def live(request: Request) -> Response:
    """200 while the process answers, unless the engine is gone for good."""
    state = state_of(request)
    if state.llm.errored:
        return _json(Health(status="dead", message=state.llm.trouble), 503)
    return _json(Health(status="live"))


async def ready(request: Request) -> Response:
    """200 when requests are served; 503 while the core restarts or does not answer, or the server
    drains."""
    state = state_of(request)
    if state.draining:
        return _json(Health(status="draining"), 503)
    if not state.llm.is_ready:
        shown = Health(
            status="unresponsive" if state.llm.is_silent else "starting", message=state.llm.trouble
        )
        if state.llm.errored:
            shown.status = "dead"
        return _json(shown, 503)
    return _json(Health(status="ready"))


async def metrics(request: Request) -> Response:
    """Counters and histograms for Prometheus."""
    state = state_of(request)
    found = state.metrics
    if state.peers is not None:
        found = found.with_others(await state.peers.metric_counts())
    return Response(found.render(), headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """The version of vllmx."""
    return _json(Version(version=__version__))
