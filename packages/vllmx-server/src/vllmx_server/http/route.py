"""A route of an API: its path, endpoint, rights and documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from starlette.requests import Request

from vllmx_server.http.operation import Endpoint, Operation

ModelOf = Callable[[Request, str | None], str | None]


class Right(Enum):
    """The key that a route wants of a server with keys; without any, the first two are the same."""

    EVERYBODY = "no key is needed"
    HOLDERS = "any key opens it"
    OPERATORS = "a key of --admin-key opens it, or one with `admin` in the file of keys"


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        path: a pattern of starlette, such as `/v1/files/{id}`.
        endpoint: takes the request and returns the response; its docstring is shown in the OpenAPI
            document.
        of_model: the body names a model: with several models the endpoint gets the `Served` of that
            one, which is loaded first if necessary.
        led: the leading process answers, whichever took the request.
        for_operators: the socket of `--admin-uds` has the route as well.
        is_logged: the access log has a line for each request.
        names: the values of its parameter that are there; none: any. Others need a key.
        span: `gen_ai.operation.name` of the spans of its requests; None: it makes none.
        model_of: with `of_model`, the name of the model for a request and the `model` of its body;
            None: that is the name.
        is_sse: streams are server-sent events, which may begin before the model is loaded.
    """

    method: str
    path: str
    endpoint: Endpoint
    operation: Operation
    right: Right
    of_model: bool = False
    led: bool = False
    for_operators: bool = False
    is_logged: bool = True
    names: Sequence[str] = ()
    span: str | None = None
    model_of: ModelOf | None = None
    is_sse: bool = True
