"""Keeps routes of operators for the holders of their keys."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from starlette.requests import Request
from vllmx_core.errors import VllmxError

from vllmx_server.errors import AuthenticationError
from vllmx_server.generating.served import served_of
from vllmx_server.http.middleware import key_digest
from vllmx_server.http.operation import Endpoint


class AdminError(VllmxError):
    """What was asked for is the operator's alone."""

    http_status = 403
    code = "admin_only"


def admin(endpoint: Endpoint) -> Endpoint:
    """An endpoint for holders of an admin key. Every key is compared, in constant time."""

    async def checked(request: Request) -> Any:
        state, digest = served_of(request), key_digest(request.scope)
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
