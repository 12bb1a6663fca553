"""Request ids, authorisation and the access log, as plain ASGI: no task or queue per request."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import (
    AuthenticationError,
    error_response,
    internal_error,
    is_messages,
    route_path,
)
from vllmx_server.limits.admitted import HEADERS
from vllmx_server.limits.keys import ApiKeys
from vllmx_server.watch.tracing import Ended, Tracer, begin_trace

logger = logging.getLogger("vllmx.server")
access = logging.getLogger("vllmx.access")
_SAFE_ID = re.compile(rb"[\w.:-]{1,128}")
CLIENT_GONE = 499
"""The status in logs and metrics of a client that left before its answer began."""


class RequestContext:
    """Sets `scope["state"]`'s request_id, echoes it as X-Request-Id, logs one line a request, and
    turns a bug of ours into an answer without its details.

    Args:
        name_route: the path and the method of a request for logs and metrics: made-up ones could
            be secrets, forge lines of the log or fill the memory.
        is_logged: tells by that path whether the access log has a line for a request.
        count: called with (path, method, status) of every request.
        tracer: makes spans of requests; None: no traces are wanted.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_logged: Callable[[str], bool],
        name_route: Callable[[Scope], tuple[str, str]],
        count: Callable[[str, str, int], None],
        tracer: Tracer | None = None,
    ) -> None:
        self.app = app
        self.name_route = name_route
        self.is_logged = is_logged
        self.count = count
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode("ascii")
        state["started_s"] = time.monotonic()
        started, status = time.perf_counter(), 0
        trace = None if self.tracer is None else begin_trace(scope)
        echoes = [(b"x-request-id", request_id)]
        if is_messages(scope):
            echoes.append((b"request-id", request_id))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *echoes]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            name = request_id.decode("ascii")
            logger.error("unhandled error in request %s\n%s", name, private_traceback(error))
            if not status:
                await error_response(internal_error(), scope)(scope, receive, send_with_id)
        finally:
            route, method = self.name_route(scope)
            status = status or CLIENT_GONE
            self._note(scope, route, method, status, time.perf_counter() - started)
            if self.tracer is not None and trace is not None:
                times = state["started_s"], time.monotonic()
                self.tracer.end(trace, Ended(method, route, status, *times), scope)

    def _note(self, scope: Scope, path: str, method: str, status: int, elapsed_s: float) -> None:
        self.count(path, method, status)
        if self.is_logged(path):
            access.info(
                "%s %s %s %.1f ms %s",
                method,
                path,
                status,
                elapsed_s * 1e3,
                scope["state"]["request_id"],
            )


class Authorization:
    """Checks API keys on every route but those that are open to everybody. The holder of the key is
    the client in fair share and prefix-cache salt. Answers show the key's remaining limits.

    Args:
        is_open: True for paths that need no key.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, is_open: Callable[[str], bool]) -> None:
        self.app = app
        self.keys = keys
        self.is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.keys.is_open or self.is_open(route_path(scope)):
            await self.app(scope, receive, send)
            return
        if _is_preflight(scope):  # browsers send it without the key, to ask whether they may
            await self.app(scope, receive, send)
            return
        holder = self.keys.find(key_digest(scope))
        if holder is None:
            error = AuthenticationError(
                "missing or wrong API key: send it as 'Authorization: Bearer KEY' or as"
                " 'X-API-Key: KEY'"
            )
            await error_response(error, scope)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["client"] = holder.client
        if holder.record is None or not holder.record.has_limits:
            await self.app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = state.get(HEADERS, {}).items()
                more = [(name.encode(), value.encode()) for name, value in told]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        await self.app(scope, receive, send_with_limits)


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of this name; empty when there is none."""
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def _is_preflight(scope: Scope) -> bool:
    asks = header(scope, b"access-control-request-method")
    return scope["method"] == "OPTIONS" and bool(asks and header(scope, b"origin"))


def key_digest(scope: Scope) -> bytes:
    """The digest of the bearer token, or without one that of `X-API-Key`, the header of Anthropic's
    clients and gateways."""
    scheme, _, token = header(scope, b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        token = header(scope, b"x-api-key")
    return hashlib.sha256(token.strip()).digest()
