"""Models, health, metrics, usage of keys, version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ModelNotFoundError, listing, shown

from vllmx_server import __version__
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.served import Modality, ModelInfo, Served, served_of
from vllmx_server.http.answers import Health
from vllmx_server.http.client import owner_of
from vllmx_server.http.operation import STATUS, Endpoint, Media, Operation
from vllmx_server.http.pages import answer, check_query
from vllmx_server.http.route import Right, Route
from vllmx_server.limits.usage import KeyUsage
from vllmx_server.schema.record import Record, encode
from vllmx_server.watch.metrics import CONTENT_TYPE, Metrics, render_all


class ModelCard(Record, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["vllmx"] = "vllmx"
    root: str
    """The path or name that was loaded."""
    parent: str | None = None
    """The model that an adapter changes."""
    max_model_len: int | None
    """Tokens of the context; null of a model that was never loaded."""
    input_modalities: list[Modality] | None = None
    """The contents that a message may have, or audio alone; null of a model that was never
    loaded."""
    permission: list[str]
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    state: Literal["unloaded", "loading", "loaded", "failed"] = "loaded"
    size_bytes: int | None = None
    """The bytes of weights and KV cache, once it was loaded."""
    error: str | None = None
    """Why it could not be loaded."""


class ModelList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class KeyUsed(Record, kw_only=True):
    object: Literal["key_usage"] = "key_usage"
    key: str
    """The name of the key."""
    requests: int
    """The requests that were taken."""
    refused: int
    """The requests that a limit of the key refused."""
    prompt_tokens: int
    cached_tokens: int
    """The tokens of the prompts that came from the cache."""
    completion_tokens: int


class KeyUsedList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[KeyUsed]


class Version(Record, kw_only=True):
    version: str


async def usage(request: Request) -> Response:
    """Answers the usage of the key that asks; of all keys for one with `admin`, and on the socket
    of operators."""
    check_query(request)
    served, client = served_of(request), owner_of(request)
    holder = served.keys.holder(client)
    found = await served.usage.all()
    is_admin = holder.record is not None and holder.record.admin
    is_admin = is_admin or "is_operator" in request.scope["state"]
    clients = sorted({*found, client}) if is_admin else [client]
    rows = [
        KeyUsed(key=served.keys.holder(each).name, **asdict(found.get(each, KeyUsage())))
        for each in clients
    ]
    return answer(KeyUsedList(data=rows))


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(encode(value), status, headers=headers, media_type="application/json")


async def models(request: Request) -> Response:
    """The models that are served, with a card for each of their names."""
    return _json(ModelList(data=await _cards(served_of(request))))


async def _cards(served: Served) -> list[ModelCard]:
    """A card for each name, as clients look for the one that they were given."""
    cards = [_card(served, info) for info in await served.infos()]
    cards += _adapters(served, cards[0])
    return [_called(name, card) for card in cards for name in (card.id, *card.aliases)]


def _adapters(served: Served, base: ModelCard) -> Iterator[ModelCard]:
    """The adapters of the default model, whose card is `base`."""
    for each in served.llm.adapters or ():
        yield msgspec.structs.replace(
            base, id=each.name, root=each.path, parent=base.id, aliases=(), size_bytes=None
        )


def _called(name: str, card: ModelCard) -> ModelCard:
    others = tuple(each for each in (card.id, *card.aliases) if each != name)
    return msgspec.structs.replace(card, id=name, aliases=others)


def _card(served: Served, info: ModelInfo) -> ModelCard:
    return ModelCard(
        id=info.name,
        created=served.created,
        root=info.root,
        max_model_len=info.max_model_len,
        input_modalities=info.modalities,
        permission=[],
        aliases=info.aliases,
        state=info.state,
        size_bytes=info.num_bytes,
        error=info.error,
    )


async def model(request: Request) -> Response:
    """One model."""
    served = served_of(request)
    name = request.path_params["name"]
    cards = {card.id: card for card in await _cards(served)}
    if name not in cards:
        raise ModelNotFoundError(
            f"model {shown(name)} is not served here; served: {listing(cards)}", param="model"
        )
    return _json(cards[name])


async def live(request: Request) -> Response:
    """200 while the process answers, unless the engine is gone for good."""
    served = served_of(request)
    if served.llm.errored:
        return _json(Health(status="dead", message=served.llm.trouble), 503)
    return _json(Health(status="live"))


async def ready(request: Request) -> Response:
    """200 when requests are served; 503 while the core restarts or does not answer, or the server
    drains."""
    served = served_of(request)
    if served.admission.draining:
        return _json(Health(status="draining"), 503)
    if not served.llm.is_ready and not served.sleeps_idle:
        shown = Health(
            status="unresponsive" if served.llm.is_silent else "starting",
            message=served.llm.trouble,
        )
        if served.llm.errored:
            shown.status = "dead"
        elif served.llm.is_asleep:
            shown.status = "asleep"
        return _json(shown, 503)
    return _json(Health(status="ready"))


async def metrics(request: Request) -> Response:
    """Counters and histograms for Prometheus."""
    served = served_of(request)
    found = [served.metrics] if served.models is None else served.models.metrics()
    counts = await served.processes.metric_counts({each.model: each.counts() for each in found})
    if counts:
        own = {each.model for each in found}
        others = dict.fromkeys(model for one in counts for model in one if model not in own)
        found += map(Metrics.elsewhere, others)
        found = [
            each.with_others([one[each.model] for one in counts if each.model in one])
            for each in found
        ]
    body = found[0].render() if len(found) == 1 else render_all(found)
    return Response(body, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """The version of vllmx."""
    return _json(Version(version=__version__))


_READY = Operation(STATUS, Health, answers={503: Health})


def _open(method: str, path: str, endpoint: Endpoint, *, for_operators: bool = True) -> Route:
    """A route of probes, which come often and bring no key."""
    return Route(
        method,
        path,
        endpoint,
        _READY,
        Right.EVERYBODY,
        for_operators=for_operators,
        is_logged=False,
    )


class StatusApi(Api):
    routes = (
        keyed("GET", "/v1/models", models, STATUS, ModelList, for_operators=True),
        keyed(
            "GET",
            "/v1/models/{name:path}",
            model,
            STATUS,
            ModelCard,
            statuses=(404,),
            for_operators=True,
        ),
        _open("GET", "/ping", ready, for_operators=False),
        _open("POST", "/ping", ready, for_operators=False),
        _open("GET", "/health", ready),
        _open("GET", "/health/live", live),
        _open("GET", "/health/ready", ready),
        keyed(
            "GET",
            "/metrics",
            metrics,
            STATUS,
            Media((CONTENT_TYPE.partition(";")[0],)),
            for_operators=True,
        ),
        keyed("GET", "/version", version, STATUS, Version, for_operators=True),
        keyed(
            "GET",
            "/v1/usage",
            usage,
            STATUS,
            KeyUsedList,
            text="Of all keys for one that says `admin`.",
            for_operators=True,
        ),
    )
