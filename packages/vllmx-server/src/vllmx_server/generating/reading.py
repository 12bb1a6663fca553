"""Requests of APIs: the body as a struct, the client, and what its tokens count for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.json import Decoder
from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.client.request_limits import id_outside

from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.body import INLINE_BYTES, read_body, unread
from vllmx_server.http.client import client_of, owner_of
from vllmx_server.limits.admitted import BYTES_OF_TOKEN, Admitted
from vllmx_server.schema.decode import decode

_LISTED_TOKENS = 1 << 20
"""Listing a million tokens takes 20 ms, in which no other thread of the process runs."""


class CheckedBody(Protocol):
    """A struct of a request."""

    @property
    def model(self) -> str | None:
        """The model that is meant, None for the only one."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""


B = TypeVar("B", bound=CheckedBody)
T = TypeVar("T")


def body_bytes(request: Request) -> int:
    """Length of the body that `read_json` has read: no part of it is a longer text."""
    return cast(int, request.scope["state"]["body_bytes"])


async def read_json(request: Request, served: Served, parse: Callable[[bytes], T]) -> T:
    """Returns `parse` of the body. A large body is parsed by the text threads, in turn.

    Raises what `read_body` and `parse` raise, and QueueFullError.
    """
    client = client_of(request)
    with served.bodies.hold(client) as held:
        data = await read_body(request, served.config, held)
        request.scope["state"]["body_bytes"] = len(data)
        if len(data) <= INLINE_BYTES:
            return parse(data)
        return await served.llm.text.run(client, len(data), lambda _: parse(data))


def checked(data: bytes, served: Served, decoder: Decoder[B]) -> B:
    """The decoded and checked body. Raises what the checks raise, and ModelNotFoundError."""
    body = decode(data, decoder)
    served.check_model(body.model)
    body.check()
    return body


def most_tokens(served: Served) -> int:
    """The most tokens of a text that are listed or counted: a million, or a full context."""
    return max(_LISTED_TOKENS, served.llm.info.max_model_len)


def check_ids(tokens: list[int], vocab_size: int) -> None:
    """Raises InvalidRequestError for an id that is not in the vocabulary."""
    wrong = id_outside(tokens, vocab_size)
    if wrong is not None:
        raise InvalidRequestError(
            f"token id {wrong} is not in the vocabulary of {vocab_size} tokens", param="tokens"
        )


@asynccontextmanager
async def counted(request: Request) -> AsyncIterator[Admitted]:
    """Counts a request, whose body has been read, against the limits of its key: first by the size
    of its body, at the end by the `num_tokens` that were set. Raises ForbiddenError and
    RateLimitError."""
    num_tokens = body_bytes(request) // BYTES_OF_TOKEN
    admitted = await served_of(request).admit_text(request, num_tokens)
    try:
        yield admitted
    finally:
        admitted()


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
        priority,
        client,
        salt,
        session,
        log_id,
        share,
        queue_timeout_s,
        at_end=is_batch,
        adapter=served.adapter_of(getattr(body, "model", None)),
        prediction=getattr(body, "predicted_text", ""),
    )


Endpoint = Callable[[Request], Awaitable[Any]]


class _Fields(msgspec.Struct):
    """Fields that only some shapes have."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    texts: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    task: Raw | UnsetType = UNSET


_FIELDS = msgspec.json.Decoder(_Fields)


async def by_shape(request: Request, choose: Callable[[Collection[str]], Endpoint]) -> Any:
    """The answer of the endpoint that is meant by a body with these fields."""
    served = served_of(request)
    served.check_admission()
    with served.bodies.hold(client_of(request)) as held:
        data = await read_body(request, served.config, held)
        is_short = len(data) <= INLINE_BYTES
        names = _names(data) if is_short else await asyncio.to_thread(_names, data)
    return await choose(names)(unread(request, data))


def _names(data: bytes) -> frozenset[str]:
    """The fields of a body. Raises InvalidRequestError for one that cannot be read."""
    found = decode(data, _FIELDS)
    fields = ((name, getattr(found, name)) for name in found.__struct_fields__)
    return frozenset(
        name for name, value in fields if value is not UNSET and bytes(value) != b"null"
    )
