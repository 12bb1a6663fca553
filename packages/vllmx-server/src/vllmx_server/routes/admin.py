"""What operators do to a running server: /v1/models/load and /unload, /sleep, /wake,
/reset_prefix_cache, /shutdown. All of them want a key of --admin-key."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import InvalidRequestError, VllmxError, shown

from vllmx_server.answers.status import Health, ModelState, PrefixCachesReset
from vllmx_server.body import read_body
from vllmx_server.errors import AuthenticationError
from vllmx_server.middleware import key_digest
from vllmx_server.routes.pages import answer
from vllmx_server.schema.decode import decode
from vllmx_server.state import ServerState, client_of, state_of

Endpoint = Callable[[Request], Awaitable[Any]]


class AdminError(VllmxError):
    """What was asked for is the operator's alone."""

    http_status = 403
    code = "admin_only"


class NamedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/models/load and /unload."""

    model: str


_NAMED = msgspec.json.Decoder(NamedModel)


def admin(endpoint: Endpoint) -> Endpoint:
    """An endpoint for holders of an admin key. Every key is compared, in constant time."""

    async def checked(request: Request) -> Any:
        state, digest = state_of(request), key_digest(request.scope)
        holder = state.keys.find(digest)
        if holder is not None and holder.record is not None and holder.record.admin:
            return await endpoint(request)
        keys = state.config.admin_key
        if not keys:
            raise AdminError(
                "this route is for operators: start the server with --admin-key KEY, or give the"
                " key `admin` in the file of --api-keys-file"
            )
        known = [hashlib.sha256(key.encode()).digest() for key in keys]
        matches = [hmac.compare_digest(digest, each) for each in known]
        if not any(matches):
            if holder is not None:
                raise AdminError("this route is for operators, and this key is none of theirs")
            raise AuthenticationError(
                "this route is for operators: send a key of --admin-key as 'Authorization: Bearer"
                " KEY'"
            )
        return await endpoint(request)

    checked.__doc__, checked.__name__ = endpoint.__doc__, getattr(endpoint, "__name__", "checked")
    checked.__wrapped__ = endpoint  # type: ignore[attr-defined]
    return checked


async def load(request: Request) -> Response:
    """Loads a model; answered when it serves."""
    state, name = await _named(request)
    if state.models is not None and name != state.llm.config.name:
        await state.models.host.load(name)
    return answer(ModelState(model=name, state="loaded"))


async def unload(request: Request) -> Response:
    """Ends a model's core, unless it is in use."""
    state, name = await _named(request)
    if state.models is None or name == state.llm.config.name:
        raise InvalidRequestError(
            f"model {shown(name)} gets the requests that name none, so it stays: stop the server"
            " instead (/shutdown)",
            param="model",
        )
    await state.models.host.unload(name)
    return answer(ModelState(model=name, state="unloaded"))


async def sleep(request: Request) -> Response:
    """Ends the core of the first model, which frees its memory, until it is woken."""
    state = state_of(request)
    await (state.llm.sleep() if state.peers is None else state.peers.sleep())
    return answer(ModelState(model=state.llm.config.name, state="unloaded"))


async def wake(request: Request) -> Response:
    """Starts it again; answered when it serves."""
    state = state_of(request)
    await (state.llm.wake() if state.peers is None else state.peers.wake())
    return answer(ModelState(model=state.llm.config.name, state="loaded"))


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets the cached prefixes of all models that are loaded; false where requests run."""
    state = state_of(request)
    states = [state] if state.models is None else await state.models.loaded()
    done = {each.llm.config.name: await each.llm.reset_prefix_cache() for each in states}
    return answer(PrefixCachesReset(reset=done))


async def shutdown(request: Request) -> Response:
    """Does what SIGTERM does: drains, then ends."""
    state = state_of(request)
    if state.peers is None:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        state.peers.shut_down()
    return answer(Health(status="draining"))


async def _named(request: Request) -> tuple[ServerState, str]:
    state = state_of(request)
    with state.bodies.hold(client_of(request)) as held:
        data = await read_body(request, state.config, held)
    name = decode(data, _NAMED).model
    if state.models is not None:
        return state, state.models.name_of(name)
    state.check_model(name)
    return state, name
