"""Control of a running server: /v1/models/load and /unload, /sleep, /wake_up, /pause, /resume,
/update_weights, /reset_prefix_cache, /replicas, /shutdown.

All of them require a key of --admin-key."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import VllmxError, shown
from vllmx_engine.async_core import PauseMode
from vllmx_engine.replicas.seats import ReplicaState

from vllmx_server.generating.api import Api
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.answers import Health
from vllmx_server.http.body import read_body
from vllmx_server.http.client import client_of
from vllmx_server.http.operation import BODY, STATUS, Endpoint, Operation
from vllmx_server.http.pages import answer
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.decode import decode
from vllmx_server.schema.record import Record

_SETTLE_S, _SETTLE_POLL_S = 1.0, 0.02
"""The time in which answers of requests that `/sleep` ended can be sent."""


class NamedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/models/load and /unload."""

    model: str


class ModelState(Record, kw_only=True):
    model: str
    state: Literal["unloaded", "loaded"]


class PrefixCachesReset(Record, kw_only=True):
    reset: dict[str, bool]
    """True for each model whose cache was reset; false where requests run."""


class Sleeping(Record, kw_only=True):
    is_sleeping: bool


class Paused(Record, kw_only=True):
    is_paused: bool


class NumberedReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /replicas/drain and /replicas/add."""

    replica: int


class Replicas(Record, kw_only=True):
    replicas: list[ReplicaState]


class NewWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /update_weights."""

    path: str
    """A folder or file on the server's machine."""


class WeightsUpdated(Record, kw_only=True):
    model: str
    path: str


_WEIGHTS = msgspec.json.Decoder(NewWeights)
_NUMBERED = msgspec.json.Decoder(NumberedReplica)
_NAMED = msgspec.json.Decoder(NamedModel)


async def load(request: Request) -> Response:
    """Loads a model; answered when it serves."""
    served, name = await _named(request)
    if served.models is not None and name != served.llm.config.name:
        await served.models.host.load(name)
    return answer(ModelState(model=name, state="loaded"))


async def unload(request: Request) -> Response:
    """Ends a model's core, unless it is in use."""
    served, name = await _named(request)
    if served.models is None or name == served.llm.config.name:
        raise field_error(
            "model",
            f"{shown(name)} gets the requests that name none, so it stays: stop the server"
            " instead (/shutdown)",
        )
    await served.models.host.unload(name)
    return answer(ModelState(model=name, state="unloaded"))


async def sleep(request: Request) -> Response:
    """Ends the core of the first model, which frees its memory, until it is woken. Level 1 keeps
    the files of weights in the host's memory."""
    served = served_of(request)
    level, mode = (request.query_params.get(name) for name in ("level", "mode"))
    if level not in (None, "1", "2"):
        raise field_error("level", f"it is 1 or 2, got {shown(level)}")
    if mode not in (None, "abort", "wait"):
        raise field_error(
            "mode",
            f"it is abort or wait, got {shown(mode)}: a core that sleeps keeps no requests; /pause"
            " with mode=keep does",
        )
    await _put_to_sleep(served, int(level or 1), cast("PauseMode | None", mode))
    return answer(ModelState(model=served.llm.config.name, state="unloaded"))


async def _put_to_sleep(served: Served, level: int, mode: PauseMode | None) -> None:
    """Puts the first model to sleep. With a mode, running requests end first; those that come
    meanwhile are lost."""
    if mode is not None:
        await served.llm.pause(mode)
        until_s = time.monotonic() + _SETTLE_S
        while served.llm.num_in_flight and time.monotonic() < until_s:
            await asyncio.sleep(_SETTLE_POLL_S)
    try:
        await served.processes.sleep(level, force=mode is not None)
    except VllmxError:
        if mode is not None:
            await served.llm.resume()
        raise


async def wake(request: Request) -> Response:
    """Starts it again; answered when it serves. Weights and KV cache wake together, whichever of
    them `tags` names."""
    served = served_of(request)
    for tag in request.query_params.getlist("tags"):
        if tag not in ("weights", "kv_cache"):
            raise field_error("tags", f"they are weights and kv_cache, got {shown(tag)}")
    await served.processes.wake()
    return answer(ModelState(model=served.llm.config.name, state="loaded"))


async def is_sleeping(request: Request) -> Response:
    """Tells whether the first model sleeps."""
    return answer(Sleeping(is_sleeping=served_of(request).llm.is_asleep))


async def pause(request: Request) -> Response:
    """Stops the steps of the first model's core; answered when none is under way."""
    llm = served_of(request).llm
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise field_error("mode", f"it is abort, wait or keep, got {shown(mode)}")
    await llm.pause(cast(PauseMode, mode))
    if request.query_params.get("clear_cache", "true") != "false" and mode != "keep":
        await llm.reset_prefix_cache()
    return answer(Paused(is_paused=True))


async def is_paused(request: Request) -> Response:
    """Tells whether the first model's core is paused."""
    return answer(Paused(is_paused=await served_of(request).llm.is_paused()))


async def resume(request: Request) -> Response:
    """Goes on with the steps of the first model's core."""
    await served_of(request).llm.resume()
    return answer(Paused(is_paused=False))


async def update_weights(request: Request) -> Response:
    """Loads other weights into the first model; answered when it serves them."""
    served = served_of(request)
    with served.bodies.hold(client_of(request)) as held:
        data = await read_body(request, served.config, held)
    path = decode(data, _WEIGHTS).path
    await served.llm.update_weights(path)
    return answer(WeightsUpdated(model=served.llm.config.name, path=path))


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets the cached prefixes of all models that are loaded; false where requests run."""
    served = served_of(request)
    states = [served] if served.models is None else await served.models.loaded()
    done = {each.llm.config.name: await each.llm.reset_prefix_cache() for each in states}
    return answer(PrefixCachesReset(reset=done))


async def replicas(request: Request) -> Response:
    """Lists the replicas of the first model and what they do."""
    return answer(Replicas(replicas=served_of(request).llm.replicas))


async def drain_replica(request: Request) -> Response:
    """Ends a replica; its requests end there or, after --drain-timeout-s, go on elsewhere."""
    served, number = await _numbered(request)
    await served.processes.drain_replica(number, served.config.drain_timeout_s)
    return answer(Replicas(replicas=served.llm.replicas))


async def add_replica(request: Request) -> Response:
    """Starts a drained replica again; answered when it serves."""
    served, number = await _numbered(request)
    await served.processes.add_replica(number)
    return answer(Replicas(replicas=served.llm.replicas))


async def _numbered(request: Request) -> tuple[Served, int]:
    served = served_of(request)
    with served.bodies.hold(client_of(request)) as held:
        data = await read_body(request, served.config, held)
    return served, decode(data, _NUMBERED).replica


async def shutdown(request: Request) -> Response:
    """Does what SIGTERM does: drains, then ends."""
    served_of(request).processes.shut_down()
    return answer(Health(status="draining"))


async def _named(request: Request) -> tuple[Served, str]:
    served = served_of(request)
    with served.bodies.hold(client_of(request)) as held:
        data = await read_body(request, served.config, held)
    name = decode(data, _NAMED).model
    if served.models is not None:
        return served, served.models.name_of(name)
    served.check_model(name)
    return served, name


_TEXT = "For holders of a key of `--admin-key`, or of one with `admin` in the file of keys."


def _route(path: str, endpoint: Endpoint, answer: Any) -> Route:
    return Route("POST", path, endpoint, _status(answer), Right.OPERATORS)


def _status(answer: Any) -> Operation:
    return Operation(STATUS, answer, text=_TEXT)


_NAMED_MODEL = Operation(
    STATUS, ModelState, NamedModel, _TEXT, statuses=(*BODY, 404), example={"model": "demo"}
)
_NUMBERED_REPLICA = Operation(
    STATUS, Replicas, NumberedReplica, _TEXT, statuses=BODY, example={"replica": 0}
)
_NEW_WEIGHTS = Operation(
    STATUS,
    WeightsUpdated,
    NewWeights,
    _TEXT,
    statuses=(*BODY, 404),
    example={"path": "checkpoints/step-1000"},
)


class OperatorsApi(Api):
    routes = (
        Route("POST", "/v1/models/load", load, _NAMED_MODEL, Right.OPERATORS),
        Route("POST", "/v1/models/unload", unload, _NAMED_MODEL, Right.OPERATORS),
        _route("/sleep", sleep, ModelState),
        _route("/wake", wake, ModelState),
        _route("/wake_up", wake, ModelState),
        Route("GET", "/is_sleeping", is_sleeping, _status(Sleeping), Right.OPERATORS),
        _route("/pause", pause, Paused),
        _route("/resume", resume, Paused),
        Route("GET", "/is_paused", is_paused, _status(Paused), Right.OPERATORS),
        Route("POST", "/update_weights", update_weights, _NEW_WEIGHTS, Right.OPERATORS),
        _route("/reset_prefix_cache", reset_prefix_cache, PrefixCachesReset),
        Route("GET", "/replicas", replicas, _status(Replicas), Right.OPERATORS),
        Route("POST", "/replicas/drain", drain_replica, _NUMBERED_REPLICA, Right.OPERATORS),
        Route("POST", "/replicas/add", add_replica, _NUMBERED_REPLICA, Right.OPERATORS),
        _route("/shutdown", shutdown, Health),
    )
