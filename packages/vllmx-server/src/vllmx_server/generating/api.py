"""The interface of an API to the server that hosts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllmx_server.config import ServerConfig
from vllmx_server.errors import ErrorShape
from vllmx_server.generating.served import Served
from vllmx_server.http.operation import GENERATES, JSON, Endpoint, Operation, Task
from vllmx_server.http.route import ModelOf, Right, Route


class Api:
    """Routes, and what they keep. A plugin names a subclass in an `ApiSpec`; a server makes one
    object of it while the model loads.

    Endpoints find the server by `served_of(request)`, and an object that `start` has put there by
    `Served.store`.
    """

    routes: Sequence[Route] = ()
    error_shapes: Sequence[tuple[str, ErrorShape]] = ()
    """The beginning of paths and the shape of their errors; others have OpenAI's."""

    takes_untyped = False
    """Programs may send bodies without declaring them as JSON; web pages may not."""

    takes_any_model = False
    """A server of one model answers requests for any name, on all routes."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config

    def start(self, served: Served) -> None:
        """Called once in each process, before its first request."""

    async def lead(self, *, takes_over: bool) -> None:
        """Begins the work that one process does for the whole server. `takes_over`: another process
        did that work, and has died."""

    async def clean(self) -> None:
        """Deletes what is too old. Called every few minutes in the process that leads."""

    async def stop(self) -> None:
        """Ends the work that `lead` has begun. May be called twice, and without `lead`."""

    def close(self) -> None:
        """Frees what the process holds, after its last request. May be called twice."""


def keyed(
    method: str,
    path: str,
    endpoint: Endpoint,
    tag: str,
    answer: Any = None,
    body: Any = None,
    *,
    of_model: bool = False,
    led: bool = False,
    for_operators: bool = False,
    span: str | None = None,
    model_of: ModelOf | None = None,
    is_sse: bool = True,
    **about: Any,
) -> Route:
    """A `Route` that any key opens. `about`: further fields of its `Operation`."""
    operation = Operation(tag, answer, body, **about)
    return Route(
        method,
        path,
        endpoint,
        operation,
        Right.HOLDERS,
        of_model=of_model,
        led=led,
        for_operators=for_operators,
        span=span,
        model_of=model_of,
        is_sse=is_sse,
    )


def posted(
    path: str, endpoint: Endpoint, tag: str, body: Any, task: Task | None = None, **more: Any
) -> Route:
    """A route of another server's API, for the model that the body names. `more`: see `keyed`."""
    about = {"answer": JSON, "statuses": GENERATES, **more}
    return keyed("POST", path, endpoint, tag, body=body, task=task, of_model=True, **about)
