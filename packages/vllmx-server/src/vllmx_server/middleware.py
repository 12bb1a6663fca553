"""Request ids, authorisation and the access log, as plain ASGI: no task or queue per request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllmx_server.errors import AuthenticationError, error_response

access = logging.getLogger("vllmx.access")
_SAFE_ID = re.compile(r"[\w.:-]{1,128}")
PUBLIC_PATHS = ("/health", "/health/live", "/health/ready")


class RequestContext:
    """Sets `scope["state"]`'s request_id, echoes it as X-Request-Id, logs one line a request."""

    def __init__(self, app: ASGIApp, *, log: bool) -> None:
        self.app = app
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.log and scope["path"] not in PUBLIC_PATHS:
                access.info(
                    "%s %s %s %.1f ms %s",
                    scope["method"], scope["path"], status or "-",
                    (time.perf_counter() - started) * 1e3, request_id,
                )  # fmt: skip


class Authorization:
    """Bearer tokens on every route but /health, compared in constant time. The digest of the key
    names the client: fair share and prefix-cache salt go by it."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or not self.digests:
            await self.app(scope, receive, send)
            return
        digest = self._digest(Headers(scope=scope).get("authorization", ""))
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        if not any(matches):
            error = AuthenticationError(
                "missing or wrong API key: send it as 'Authorization: Bearer KEY'"
            )
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = digest.hex()[:16]
        await self.app(scope, receive, send)

    @staticmethod
    def _digest(header: str) -> bytes:
        scheme, _, token = header.partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
