"""The description of a route, in addition to its path and the docstring of its endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request

Endpoint = Callable[[Request], Awaitable[Any]]

BODY = (400, 408, 413, 415, 429, 503)
"""Errors of routes that read a body and do some work for it."""
GENERATES = (*BODY, 404, 504)
"""Errors of routes that ask a model, in addition to `ANY`."""
ANY = (400, 401, 403, 500, 503)
"""Errors of all routes: malformed HTTP, no key, another host, a bug of ours, overload."""
GENERATING, VECTORS, TEXT = "Generating", "Vectors and scores", "Texts and tokens"
STATUS, PAGES = "Status", "Pages"
COUNTED = (GENERATING, VECTORS, TEXT)
"""Tags of routes whose requests count against the limits of a key."""
HELLO = [{"role": "user", "content": "Hello!"}]
SCHEMA = {"type": "string"}
Task = Literal["generate", "embed", "token_embed", "classify", "score", "pool"]
"""The task of a model that a route needs: "pool" is any but "generate"."""


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of the query."""

    name: str
    text: str
    schema: Mapping[str, Any] = field(default_factory=lambda: SCHEMA)


@dataclass(frozen=True, slots=True)
class Form:
    """A body of multipart/form-data."""

    properties: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Media:
    """An answer of one of these media types instead of a struct."""

    media_types: tuple[str, ...]


JSON = Media(("application/json",))
"""An answer whose shape another server's documentation describes."""


@dataclass(frozen=True, slots=True)
class Events:
    """An answer as server-sent events.

    Attributes:
        data: the type of their data; a union of tagged structs, where events have names.
        is_named: events have the names of the tags of their data.
        ends_with: what the last event's data is instead.
    """

    data: Any
    is_named: bool
    ends_with: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One route, or several that are answered alike.

    Attributes:
        tag: the group that it is shown in.
        answer: the type of a 200, or one of several, or what that is else.
        body: the struct of its body, or one of several.
        text: what the docstring of the endpoint does not say, in Markdown.
        events: what it streams, where the body asks for that.
        statuses: its errors in addition to `ANY`.
        answers: structs of statuses whose errors have another shape; None: without a body.
        example: a body that is answered, where what it names is there.
        is_anthropic: errors have the shape of Anthropic's API.
        task: what the model must do; None: any model answers.
        shapes: the paths whose bodies are taken and answered as there, instead of own ones.
    """

    tag: str
    answer: Any = None
    body: type | tuple[type, ...] | Form | None = None
    text: str = ""
    query: tuple[Query, ...] = ()
    events: Events | None = None
    statuses: tuple[int, ...] = ()
    answers: Mapping[int, Any] = field(default_factory=dict)
    example: Mapping[str, Any] | None = None
    is_anthropic: bool = False
    task: Task | None = None
    shapes: tuple[str, ...] = ()


LIMIT = {"type": "integer", "minimum": 1}
AFTER = Query("after", "The id behind which the page begins.")
ORDER = Query("order", "The newest first, or the oldest.", {"enum": ["asc", "desc"]})
INCLUDE = (
    Query("include", "Accepted and ignored."),
    Query("include[]", "Accepted and ignored."),
)
