"""Reading a body into a struct, and what its tokens count for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar, cast

from msgspec.json import Decoder
from starlette.requests import Request

from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.body import INLINE_BYTES, read_body
from vllmx_server.http.client import client_of
from vllmx_server.limits.admitted import BYTES_OF_TOKEN, Admitted
from vllmx_server.schema.decode import decode

_LISTED_TOKENS = 1 << 20
"""Listing a million tokens takes 20 ms, in which no other thread of the process runs."""


class CheckedBody(Protocol):
    """A struct of a request."""

    @property
    def model(self) -> str | None:
        """The model that is meant, None for the only one."""
        ...

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        ...


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
    """How many tokens of a text are listed or counted: a million, and what the context holds."""
    return max(_LISTED_TOKENS, served.llm.info.max_model_len)


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
