"""One line of a batch: answered by the route that it names, as if a client had sent it there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.apis.batches.store import LineState
from vllmx_server.errors import error_response, internal_error
from vllmx_server.http.connections.applications import Client
from vllmx_server.limits.admission import GIVEN_BODY
from vllmx_server.store.database import logger

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
_encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, frozen=True):
    """What a route answered."""

    status: int
    request_id: str
    body: bytes
    code: str | None = None
    """The code of its error."""

    @property
    def state(self) -> LineState:
        return LineState.ANSWERED if self.status < 400 else LineState.FAILED

    def record(self, custom_id: str) -> bytes:
        """A line of the output, or of the errors."""
        response = {
            "status_code": self.status,
            "request_id": self.request_id,
            "body": msgspec.Raw(self.body),
        }
        return _record(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """A line of the errors for a request that nobody answered."""
    return _record(custom_id, None, {"code": code, "message": message})


def _record(custom_id: str, response: Any, error: Any) -> bytes:
    name = f"batch_req_{os.urandom(16).hex()}"
    record = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return _encode(record).replace(b"\n", b" ") + b"\n"  # JSON has them between values alone


class _Peek(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


_PEEK = msgspec.json.Decoder(_Peek)


class LineAnswerer:
    """Calls routes without a connection.

    Args:
        app: the application that they belong to.
        endpoints: by path.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def answer(self, url: str, body: bytes, owner: str) -> Answer:
        """What the route answers; it raises nothing but CancelledError, which ends the work."""
        request_id = os.urandom(16).hex()
        scope = self._scope(url, body, owner, request_id)
        collected = _Collected()
        code: str | None = None
        try:
            _check_peek(body)
            request = Request(scope, collected.receive)
            response = await self._endpoints[url](request)
        except VllmxError as error:
            response, code = error_response(error, scope), error.code
        except Exception as error:
            response = self._bug(scope, error)
        try:
            await response(scope, collected.receive, collected.send)
        except VllmxError as error:
            shown: Response = error_response(error, scope)
            return Answer(shown.status_code, request_id, bytes(shown.body), error.code)
        except Exception as error:
            shown = self._bug(scope, error)
            return Answer(shown.status_code, request_id, bytes(shown.body))
        return Answer(collected.status, request_id, bytes(collected.body), code)

    def _bug(self, scope: Scope, error: Exception) -> Response:
        request_id, where = scope["state"]["request_id"], private_traceback(error)
        logger.error("unhandled error in request %s of a batch\n%s", request_id, where)
        return error_response(internal_error(), scope)

    def _scope(self, url: str, body: bytes, owner: str, request_id: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": None,
            "server": None,
            "app": self._app,
            "state": {
                "request_id": request_id,
                "client": owner,
                "is_batch": True,
                GIVEN_BODY: body,
            },
        }


def _check_peek(body: bytes) -> None:
    try:
        found = _PEEK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the route says what is wrong with it
    for name in ("stream", "background"):
        if getattr(found, name):
            raise InvalidRequestError(f"{name}: a batch is not streamed, leave it out", param=name)


class _Collected(Client):
    """The connection that a route sees: nothing comes from a client that never leaves."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing comes")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
