"""The client of a request: its name, its key's limits, its turn in the engine."""

from __future__ import annotations

from typing import Protocol, cast

from starlette.requests import Request
from vllmx_engine.client.request import RequestOptions

from vllmx_server.generating.served import served_of
from vllmx_server.http.client import client_of, owner_of

BATCH_PRIORITY = (1 << 31) - 1
"""The priority of batches: everything else comes first."""


class Named(Protocol):
    """A body that may name its request."""

    @property
    def request_id(self) -> str | None: ...


class HasPriority(Protocol):
    """A body that says how urgent it is, and whose prefixes it shares."""

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...


def request_id_of(request: Request, body: Named) -> str:
    """The body's own request_id, or the one of the HTTP request. A name for the answer and for
    logs: clients may give one to several requests."""
    return body.request_id or cast(str, request.scope["state"]["request_id"])


def caller_of(request: Request, body: HasPriority) -> RequestOptions:
    """The client that asks, and how urgently. The prefix-cache salt goes by the API key, so that no
    client can probe another's prompts; a `cache_salt` of the request narrows it further. Raises
    InvalidRequestError for a priority that the key does not allow."""
    client, key, served = client_of(request), owner_of(request), served_of(request)
    priority, queue_timeout_s = BATCH_PRIORITY, 0.0
    is_batch = "is_batch" in request.scope["state"]
    if not is_batch:
        queue_timeout_s = served.config.queue_timeout_s
        priority = served.priorities.get(key, served.priorities[""]).checked(body.priority)
    salt = f"{key}\n{body.cache_salt}" if body.cache_salt else key
    session = getattr(body, "session_id", None) or ""
    log_id = request.scope["state"]["request_id"]
    share = served.keys.holder(key).share
    return RequestOptions(
        priority, client, salt, session, log_id, share, queue_timeout_s, at_end=is_batch
    )
