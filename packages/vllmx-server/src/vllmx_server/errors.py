"""Errors as clients see them: in OpenAI's shape, without the internals of exceptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Self

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope
from vllmx_core.errors import VllmxError, excerpt

from vllmx_server.schema.record import Record

AnthropicType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]


class ErrorFields(Record, kw_only=True):
    message: str
    """The fault and its remedy."""
    type: str
    param: str | None
    """The field at fault."""
    code: str


class ErrorAnswer(Record, kw_only=True):
    """The answer of all routes but those of Anthropic's API with a status of 400 or above."""

    error: ErrorFields


class MessagesErrorFields(Record, kw_only=True):
    type: AnthropicType
    message: str


class MessagesError(Record, kw_only=True):
    """The answer of the routes of Anthropic's API with a status of 400 or above, and the event
    `error` of their streams."""

    type: Literal["error"] = "error"
    error: MessagesErrorFields


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    424: "external_connector_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES: dict[int, AnthropicType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"
_MAX_MESSAGE, _MAX_PARAM = 1000, 200
_encode = msgspec.json.Encoder().encode


class BadHTTPError(VllmxError):
    """The bytes that arrived are not a request of HTTP/1.1."""

    http_status = 400
    code = "bad_http"

    @classmethod
    def of(cls, status: int, reason: str) -> Self:
        """Makes an error with another status, of those that HTTP has for it."""
        error = cls(reason)
        error.http_status = status
        return error


class HostError(VllmxError):
    """The Host header names another host, as that of a web page whose name points here does."""

    http_status = 403
    code = "host_not_allowed"


class OriginError(VllmxError):
    """A web page of another site sent a form, which browsers do without asking the server first."""

    http_status = 403
    code = "origin_not_allowed"


class BodyTooLargeError(VllmxError):
    """The request body is over `max_body_bytes`."""

    http_status = 413
    code = "body_too_large"


class HeaderTimeoutError(VllmxError):
    """The headers of a request did not arrive in time."""

    http_status = 408
    code = "header_timeout"


class BodyTimeoutError(VllmxError):
    """The request body did not arrive in time."""

    http_status = 408
    code = "body_timeout"


class MediaTypeError(VllmxError):
    """The request body is not declared as JSON."""

    http_status = 415
    code = "unsupported_media_type"


class AuthenticationError(VllmxError):
    """No API key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class ToolServerError(VllmxError):
    """The request needs an MCP server that cannot be reached."""

    http_status = 424
    code = "external_connector_error"


class ForbiddenError(VllmxError):
    """The key does not have the right."""

    http_status = 403
    code = "forbidden"


class RateLimitError(VllmxError):
    """The key has reached a limit."""

    http_status = 429
    code = "rate_limit_exceeded"
    retry_after_s = 1.0
    """Sent as `Retry-After`."""
    headers: dict[str, str] | None = None
    """Headers with the key's remaining limits, such as x-ratelimit-*."""


class OverloadedError(VllmxError):
    """The server has too much to do, or is shutting down."""

    http_status = 503
    code = "overloaded"


class RequestTimeoutError(VllmxError):
    """The request did not end within `request_timeout_s`."""

    http_status = 504
    code = "request_timeout"


class AbortedError(VllmxError):
    """The engine aborted an answer."""

    http_status = 503
    code = "aborted"


class RouteNotFoundError(VllmxError):
    """No such route."""

    http_status = 404
    code = "not_found"


class MethodNotAllowedError(VllmxError):
    """The route is there, but not with this method."""

    http_status = 405
    code = "method_not_allowed"


ErrorShape = Callable[[VllmxError], bytes]
"""Makes the body of an error's answer."""


def cut_message(error: VllmxError) -> str:
    """The message at a bounded length: it may quote megabytes of the request."""
    return excerpt(error.message, _MAX_MESSAGE)


def error_fields(error: VllmxError) -> ErrorFields:
    """An error as OpenAI's API describes one."""
    param = error.param
    return ErrorFields(
        message=cut_message(error),
        type=_TYPES.get(error.http_status, "internal_error"),
        param=param[:_MAX_PARAM] if param is not None else None,
        code=error.code,
    )


def error_body(error: VllmxError) -> bytes:
    """JSON of one error."""
    return _encode(ErrorAnswer(error=error_fields(error)))


def messages_error_body(error: VllmxError) -> bytes:
    """JSON of one error as Anthropic's API has it."""
    other: AnthropicType = "api_error" if error.http_status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.http_status, other)
    fields = MessagesErrorFields(type=kind, message=cut_message(error))
    return _encode(MessagesError(error=fields))


def error_response(error: VllmxError, scope: Scope | None = None) -> Response:
    """Makes the response of an error, in the shape of the API that its path belongs to."""
    headers = {}
    if error.http_status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 1.0))))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    shape = error_body if scope is None else error_shape(scope)
    return Response(shape(error), error.http_status, headers=headers, media_type="application/json")


def error_shape(scope: Scope) -> ErrorShape:
    """The shape of errors on the path of a request."""
    if is_messages(scope):
        return messages_error_body
    app = scope.get("app")
    shapes: Sequence[tuple[str, ErrorShape]] = getattr(app.state, "error_shapes", ()) if app else ()
    path = route_path(scope) if shapes else ""
    found = (each for begin, each in shapes if f"{path}/".startswith(f"{begin}/"))
    return next(found, error_body)


def is_messages(scope: Scope) -> bool:
    """True if a request is for a route of Anthropic's API."""
    path: str = route_path(scope)
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def route_path(scope: Scope) -> str:
    """The path without `root_path`, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def internal_error() -> VllmxError:
    """The error that clients see for a bug of ours."""
    return VllmxError("internal error: the server's log has the details under this request's id")


async def on_vllmx_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, VllmxError)
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answers 404 and 405 of the router in the same shape."""
    assert isinstance(error, HTTPException)
    # Not request.url: building it fails for a Host header that is not a host.
    path = excerpt(request.scope["path"])
    kind = MethodNotAllowedError if error.status_code == 405 else RouteNotFoundError
    response = error_response(
        kind(f"{request.method} {path}: {error.detail.lower()}; docs/serving.md lists the routes"),
        request.scope,
    )
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(_methods(request))
    return response


def _methods(request: Request) -> list[str]:
    """The methods of all routes that have the path of a request."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    fitting = (each for each in routes if each.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for each in fitting for method in each.methods or ()})
