"""The API's document: OpenAPI 3.1 of the routes of an application."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from vllmx_core.errors import VllmxError

from vllmx_server import __version__
from vllmx_server.apis.openapi.schemas import Bounds, Schema, schemas_of, security
from vllmx_server.errors import ErrorAnswer, MessagesError
from vllmx_server.http.operation import ANY, COUNTED, Events, Form, Media, Operation
from vllmx_server.http.route import Route

ABOUT = """\
An inference server with OpenAI's and Anthropic's APIs. Unknown fields are refused by their names.
Routes whose `security` says so want a key, as a bearer token or as `X-API-Key`. A route with
`x-served: false` needs a model that does something else than the one here, and answers 400. Errors
that come before there is a route (no valid HTTP, or no such route: 400, 404, 405, 408, 431) have
the shape of the others."""
_REASONS = {
    200: "The answer.",
    304: "What the client has is what there is.",
    400: "The request can never be served as it stands.",
    401: "No key, or a wrong one.",
    403: "The Host or Origin header names somebody else, or the key has no right to this.",
    404: "There is no such model, or nothing of this id.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or as much is kept as may be.",
    415: "The body is of another type, or compressed.",
    429: "Too much waits already, or the key has used what it may for now: see Retry-After.",
    500: "The model or the server failed.",
    503: "The server starts, drains or is full: see Retry-After.",
    504: "The request took longer than the server lets it.",
}
_PARAMETERS = {
    "id": "The id that its answer had.",
    "item": "The id of the item.",
    "name": "The name of a model or a file.",
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_HEADERS = {
    "X-Request-Id": {
        "description": "The request's name in logs: the client's own, or a new one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which to ask again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
}
_LIMITS = {
    f"X-RateLimit-{part}-{what}": {
        "description": f"{text}, of a key with such a limit.",
        "schema": {"type": "string", "pattern": pattern},
    }
    for what in ("Requests", "Tokens")
    for part, text, pattern in (
        ("Limit", f"{what} a minute", r"^\d+$"),
        ("Remaining", f"{what} that are left now", r"^\d+$"),
        ("Reset", f"The time until all {what.lower()} are there again", r"^\d+\.\d+s$"),
    )
}
"""The headers of answers that count against the limits of a key, and of refusals for them."""


class UndocumentedRouteError(VllmxError):
    """A route that the document would leave out."""


def document(routes: Sequence[Route], bounds: Bounds | None = None) -> dict[str, Any]:
    """OpenAPI of these routes, with the bounds of one server if they are given. Raises
    UndocumentedRouteError."""
    found = list(_operations(routes))
    types = dict.fromkeys(kind for _, _, operation in found for kind in _types(operation))
    types |= dict.fromkeys((ErrorAnswer, MessagesError))
    packages = {route.endpoint.__module__.partition(".")[0] for route in routes}
    schemas, components = schemas_of(types, packages | {"vllmx_server"})
    if bounds is not None:
        bounds.narrow(components)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, text, operation in found:
        shown = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", route.path)
        about = _shown(route.method, shown, text, operation, refs)
        about["security"] = security(route.right, bounds)
        if bounds is not None and operation.task is not None:
            about["x-served"] = bounds.does(operation.task)
        paths.setdefault(shown, {})[route.method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllmx", "version": __version__, "description": ABOUT},
        "tags": [{"name": tag} for tag in dict.fromkeys(each[2].tag for each in found)],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _HEADERS | _LIMITS,
            "securitySchemes": _SECURITY,
        },
    }


def _operations(routes: Sequence[Route]) -> Iterator[tuple[Route, str, Operation]]:
    """(route, docstring, operation) of each route."""
    by_path = {route.path: route.operation for route in routes if route.method == "POST"}
    for route in routes:
        text = route.endpoint.__doc__
        if not text:
            endpoint = f"{route.endpoint.__module__}.{route.endpoint.__name__}"
            raise UndocumentedRouteError(
                f"{route.method} {route.path} is not documented: give {endpoint} a docstring"
            )
        operation = route.operation
        if operation.shapes:
            shapes = [by_path[path] for path in operation.shapes if path in by_path]
            operation = _joined(operation, shapes)
        yield route, text, operation


def _joined(operation: Operation, shapes: Sequence[Operation]) -> Operation:
    """An operation that takes and answers what each of `shapes` does."""
    bodies = dict.fromkeys(kind for each in shapes for kind in _alternatives(each.body))
    answers = [kind for each in shapes for kind in _alternatives(each.answer)]
    events = [each.events for each in shapes if each.events is not None]
    return replace(
        operation,
        body=tuple(bodies),
        answer=tuple(kind for index, kind in enumerate(answers) if kind not in answers[:index]),
        events=replace(events[0], data=reduce(or_, (each.data for each in events)))
        if events
        else None,
    )


def _types(operation: Operation) -> Iterator[Any]:
    """The structs that it refers to."""
    for kind in (operation.answer, operation.body, *operation.answers.values()):
        yield from _alternatives(kind)
    if operation.events is not None:
        yield from _kinds(operation.events)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that are meant; none of what is of no type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return tuple(each for each in kinds if each is not None and not isinstance(each, Form | Media))


def _schema(kind: Any, refs: dict[Any, Schema]) -> Schema:
    found = [refs[each] for each in _alternatives(kind)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _kinds(events: Events) -> tuple[Any, ...]:
    return typing.get_args(events.data) or (events.data,)


def _shown(
    method: str, path: str, text: str, operation: Operation, refs: dict[Any, Schema]
) -> dict[str, Any]:
    words = " ".join(text.split())
    summary = re.split(r"(?<=[.])\s", words, maxsplit=1)[0].removesuffix(".")
    more = [words] if words.removesuffix(".") != summary else []
    if operation.text:
        more.append(operation.text)
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": summary,
        "tags": [operation.tag],
    }
    if more:
        found["description"] = "\n\n".join(more)
    if parameters := list(_parameters(path, operation)):
        found["parameters"] = parameters
    if operation.body is not None:
        found["requestBody"] = _body(operation, refs)
    found["responses"] = _answers(operation, refs)
    return found


def _parameters(path: str, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", path):
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PARAMETERS.get(name, "A part of the path."),
            "schema": {"type": "string", "minLength": 1},
        }
    for each in operation.query:
        yield {
            "name": each.name,
            "in": "query",
            "description": each.text,
            "schema": dict(each.schema),
        }


def _body(operation: Operation, refs: dict[Any, Schema]) -> dict[str, Any]:
    if isinstance(operation.body, Form):
        form = operation.body
        schema = {
            "type": "object",
            "properties": {name: dict(each) for name, each in form.properties.items()},
            "required": list(form.required),
            "additionalProperties": False,
        }
        media_type = "multipart/form-data"
    else:
        schema, media_type = _schema(operation.body, refs), "application/json"
    content: dict[str, Any] = {"schema": schema}
    if operation.example is not None:
        content["example"] = dict(operation.example)
    return {"required": True, "content": {media_type: content}}


def _answers(operation: Operation, refs: dict[Any, Schema]) -> dict[str, Any]:
    content: dict[str, Any]
    if isinstance(operation.answer, Media):
        content = {media_type: {} for media_type in operation.answer.media_types}
    else:
        content = {"application/json": {"schema": _schema(operation.answer, refs)}}
    if operation.events is not None:
        content["text/event-stream"] = _event_stream(operation.events, refs)
    limits = tuple(_LIMITS) if operation.tag in COUNTED else ()
    found = {"200": _answer(200, content, limits)}
    error = refs[MessagesError if operation.is_anthropic else ErrorAnswer]
    for status in sorted({*ANY, *operation.statuses, *operation.answers}):
        kind = operation.answers.get(status, operation)
        schema = error if kind is operation else refs.get(kind)
        content = {} if schema is None else {"application/json": {"schema": schema}}
        found[str(status)] = _answer(status, content, limits if status == 429 else ())
    return found


def _answer(status: int, content: dict[str, Any], limits: Sequence[str] = ()) -> dict[str, Any]:
    names = ["X-Request-Id", *(["Retry-After"] if status in (429, 503) else []), *limits]
    found: dict[str, Any] = {
        "description": _REASONS[status],
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names},
    }
    return {**found, "content": content} if content else found


def _event_stream(events: Events, refs: dict[Any, Schema]) -> dict[str, Any]:
    """OpenAPI 3.1 knows no events: the stream is a string, and `x-events` says what comes in it."""
    shown: list[dict[str, Any]] = []
    for kind in _kinds(events):
        name = {"event": kind.__struct_config__.tag} if events.is_named else {}
        shown.append({**name, "data": refs[kind]})
    if not events.is_named:
        shown.append({"data": refs[ErrorAnswer]})
    if events.ends_with is not None:
        shown.append({"data": {"const": events.ends_with}})
    return {"schema": {"type": "string"}, "x-events": shown}
