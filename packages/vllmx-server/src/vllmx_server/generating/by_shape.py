"""Routes that answer bodies of several shapes: what a body holds says which endpoint is meant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request

from vllmx_server.generating.served import served_of
from vllmx_server.http.body import INLINE_BYTES, read_body, unread
from vllmx_server.http.client import client_of
from vllmx_server.schema.decode import decode

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
