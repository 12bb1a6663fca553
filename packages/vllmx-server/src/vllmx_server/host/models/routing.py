"""Routes a request to the model that its body names, which is loaded if necessary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import error_response, internal_error, is_messages
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.body import INLINE_BYTES, read_body, unread
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.event_stream import PING
from vllmx_server.http.route import ModelOf
from vllmx_server.schema.json_text import check_weight

logger = logging.getLogger("vllmx.server")
Endpoint = Callable[[Request], Awaitable[Any]]
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Peek(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_PEEK = msgspec.json.Decoder(_Peek)


def of_model(
    endpoint: Endpoint, model_of: ModelOf | None = None, *, is_sse: bool = True
) -> Endpoint:
    """An endpoint whose `served_of` is that of the model that the body names. With one model it
    does not read the body. See `Route` for the arguments."""

    async def routed(request: Request) -> Any:
        served = served_of(request)
        if served.models is None:
            return await endpoint(request)
        served.admission.check()
        with served.bodies.hold(client_of(request)) as held:
            data = await read_body(request, served.config, held)
            is_short = len(data) <= INLINE_BYTES
            peek = _peeked(data) if is_short else await asyncio.to_thread(_peeked, data)
            asked = peek.model if model_of is None else model_of(request, peek.model)
            name = served.models.name_of(asked)
            # before anything is loaded for it
            served_of(request).holder(request).check_model(name, *served.models.aliases(name))
            interval_s = served.config.sse_ping_interval_s
            waiting = deadline_of(request, served.config).bound(served.models.served(name))
            if not served.models.is_open(name) and peek.stream and interval_s and is_sse:
                opening = asyncio.ensure_future(waiting)
                return _WaitingStream(opening, interval_s, endpoint, request, data)
            found = await waiting
        return await endpoint(_again(request, data, found))

    routed.__doc__, routed.__name__ = endpoint.__doc__, getattr(endpoint, "__name__", "routed")
    routed.__wrapped__ = endpoint  # type: ignore[attr-defined]
    return routed


def _peeked(data: bytes) -> _Peek:
    """Raises InvalidRequestError for a body with more values than are decoded."""
    if len(data) > INLINE_BYTES:
        check_weight(data)
    try:
        return _PEEK.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Peek()  # the route says what is wrong with it


def _again(request: Request, data: bytes, served: Served) -> Request:
    """The request as it came, its body unread, for one model."""
    request.scope["state"]["server"] = served
    return unread(request, data)


class _WaitingStream:
    """A streamed answer that begins with pings, until its model is loaded."""

    def __init__(
        self,
        opening: asyncio.Future[Served],
        interval_s: float,
        endpoint: Endpoint,
        request: Request,
        data: bytes,
    ) -> None:
        self._opening = opening
        self._interval_s = interval_s
        self._endpoint = endpoint
        self._request = request
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": PING, "more_body": True})
        try:
            while not self._opening.done():
                await asyncio.wait((self._opening,), timeout=self._interval_s)
                if not self._opening.done():
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
            request = _again(self._request, self._data, self._opening.result())
            response = await self._endpoint(request)
            await response(scope, request.receive, _Rest(scope, send).send)
        except VllmxError as error:
            await _end(scope, send, error_response(error, scope).body)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            name = scope["state"]["request_id"]
            logger.error("unhandled error in request %s\n%s", name, private_traceback(error))
            await _end(scope, send, error_response(internal_error(), scope).body)
        finally:
            self._opening.cancel()


class _Rest:
    """Sends the answer of an endpoint after a start that was sent before; an error as an event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._error: bytearray | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await _end(self._scope, self._send, bytes(self._error))


async def _end(scope: Scope, send: Send, error: bytes | memoryview) -> None:
    body = bytes(error)
    event = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    if is_messages(scope):
        event = b"event: error\ndata: " + body + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": False})
