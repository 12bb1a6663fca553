"""Control of a running server: /v1/models/load and /unload, /sleep, /wake, /reset_prefix_cache,
/shutdown. All of them require a key of --admin-key."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import shown

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


class NamedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/models/load and /unload."""

    model: str


class ModelState(Record, kw_only=True):
    model: str
    state: Literal["unloaded", "loaded"]


class PrefixCachesReset(Record, kw_only=True):
    reset: dict[str, bool]
    """True for each model whose cache was reset; false where requests run."""


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
    """Ends the core of the first model, which frees its memory, until it is woken."""
    served = served_of(request)
    await served.processes.sleep()
    return answer(ModelState(model=served.llm.config.name, state="unloaded"))


async def wake(request: Request) -> Response:
    """Starts it again; answered when it serves."""
    served = served_of(request)
    await served.processes.wake()
    return answer(ModelState(model=served.llm.config.name, state="loaded"))


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets the cached prefixes of all models that are loaded; false where requests run."""
    served = served_of(request)
    states = [served] if served.models is None else await served.models.loaded()
    done = {each.llm.config.name: await each.llm.reset_prefix_cache() for each in states}
    return answer(PrefixCachesReset(reset=done))


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
    return Route("POST", path, endpoint, Operation(STATUS, answer, text=_TEXT), Right.OPERATORS)


_NAMED_MODEL = Operation(
    STATUS, ModelState, NamedModel, _TEXT, statuses=(*BODY, 404), example={"model": "demo"}
)


class OperatorsApi(Api):
    routes = (
        Route("POST", "/v1/models/load", load, _NAMED_MODEL, Right.OPERATORS),
        Route("POST", "/v1/models/unload", unload, _NAMED_MODEL, Right.OPERATORS),
        _route("/sleep", sleep, ModelState),
        _route("/wake", wake, ModelState),
        _route("/reset_prefix_cache", reset_prefix_cache, PrefixCachesReset),
        _route("/shutdown", shutdown, Health),
    )
