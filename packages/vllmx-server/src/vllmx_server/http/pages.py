"""Parameters of queries, and pages of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.schema.record import Record

_encode = msgspec.json.Encoder().encode


def answer(value: object) -> Response:
    """A small JSON answer."""
    return Response(_encode(value), media_type="application/json")


def check_query(request: Request, *known: str) -> None:
    """Raises InvalidRequestError for a parameter that is not `known`."""
    for name in request.query_params:
        if name not in known:
            raise InvalidRequestError(
                f"unknown parameter {shown(name)} of the query: remove it", param=name
            )


def number(request: Request, name: str, least: int, most: int, default: int) -> int:
    """An integer of the query. Raises InvalidRequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidRequestError(
            f"{name} must be between {least} and {most}, got {shown(text)}", param=name
        )
    return int(text)


def one_of(request: Request, name: str, values: tuple[str, ...]) -> str:
    """A parameter of the query; the first of `values` by default. Raises InvalidRequestError."""
    given = request.query_params.get(name, values[0])
    if given not in values:
        raise InvalidRequestError(
            f"{name} must be {' or '.join(values)}, got {shown(given)}", param=name
        )
    return given


def newest_first(request: Request) -> bool:
    """The `order` of the query. Raises InvalidRequestError."""
    return one_of(request, "order", ("desc", "asc")) == "desc"


def page(kind: Callable[..., Record], data: Sequence[Any], has_more: bool) -> Response:
    """A page of a list; `kind` makes the list of these entries."""
    first, last = (_id_of(data[0]), _id_of(data[-1])) if data else (None, None)
    return answer(kind(data=list(data), first_id=first, last_id=last, has_more=has_more))


def _id_of(entry: Any) -> str:
    found: str = entry["id"] if isinstance(entry, dict) else entry.id
    return found
