"""Requests that one worker takes and the leader answers: batches and background responses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Scope
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import error_response, internal_error
from vllmx_server.generating.served import served_of
from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.messages import Relayed, RelayedAnswer, RelayedMore
from vllmx_server.http.body import read_body
from vllmx_server.http.client import client_of, owner_of
from vllmx_server.store.database import logger

Endpoint = Callable[[Request], Awaitable[Any]]
_READ_S = 300.0
"""Seconds that events wait for a worker that asks for them."""
_ROOM = 64
"""Pieces of a stream that may wait to be asked for."""
_HIDDEN = (b"content-length", b"transfer-encoding", b"x-request-id", b"request-id")


def led(endpoint: Endpoint, *, has_body: bool = False) -> Endpoint:
    """An endpoint that the leader answers, whichever worker took the request."""

    async def relayed(request: Request) -> Any:
        state = served_of(request)
        if state.processes.leads:
            return await endpoint(request)
        data = b""
        if has_body:
            with state.bodies.hold(client_of(request)) as held:
                data = await read_body(request, state.config, held)
        return await state.processes.relay(request, data)

    relayed.__doc__, relayed.__name__ = endpoint.__doc__, getattr(endpoint, "__name__", "relayed")
    relayed.__wrapped__ = endpoint  # type: ignore[attr-defined]
    return relayed


async def relay(channel: Channel, request: Request, body: bytes) -> Response:
    """The leader's answer to a request whose body was read."""
    client = request.scope.get("client")
    relayed = Relayed(
        method=request.method,
        path=request.url.path.removeprefix(request.scope.get("root_path", "")),
        query=request.scope["query_string"],
        body=body,
        owner=owner_of(request),
        address=str(client[0]) if client else "",
        request_id=request.scope["state"]["request_id"],
    )
    answer = await channel.ask("relay", relayed, RelayedAnswer)
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    if not answer.number:
        return Response(answer.body, answer.status, headers)
    return StreamingResponse(_stream(channel, answer), answer.status, headers)


async def _stream(channel: Channel, answer: RelayedAnswer) -> AsyncIterator[bytes]:
    try:
        while True:
            more = await channel.ask("relay_more", answer.number, RelayedMore)
            yield more.body
            if more.is_last:
                return
    finally:
        channel.tell("relay_end", answer.number)


class Relays:
    """Answers requests that other workers took.

    Args:
        app: routes to the endpoints; the middleware of the worker that took a request has
            checked it.
    """

    def __init__(self, app: ASGIApp, router: ASGIApp) -> None:
        self._app = app
        self._router = router
        self._numbers = itertools.count(1)
        self._running: dict[int, _Answering] = {}

    def serve(self, channel: Channel) -> None:
        """Serves the calls of other workers."""
        channel.serve(relay=self._answer, relay_more=self._more, relay_end=self._end)

    async def _answer(self, relayed: Relayed) -> RelayedAnswer:
        answering = _Answering(partial(self._run, self._scope(relayed)), relayed.body)
        start = await answering.start
        headers = [(name, value) for name, value in start["headers"] if name not in _HIDDEN]
        kind = dict(headers).get(b"content-type", b"")
        number, body = 0, b""
        if kind.startswith(b"text/event-stream"):
            number = next(self._numbers)
            self._running[number] = answering
        else:
            body = await answering.rest()
        return RelayedAnswer(status=start["status"], headers=headers, body=body, number=number)

    async def _more(self, number: int) -> RelayedMore:
        answering = self._running.get(number)
        if answering is None:
            raise InvalidRequestError("this stream has ended: retrieve the response again")
        return await answering.more()

    async def _end(self, number: int) -> None:
        answering = self._running.pop(number, None)
        if answering is not None:
            answering.cancel()

    async def _run(self, scope: Scope, answering: _Answering) -> None:
        try:
            await self._router(scope, answering.receive, answering.send)
            return
        except VllmxError as error:
            response = error_response(error, scope)
        except Exception as error:
            name = scope["state"]["request_id"]
            logger.error("unhandled error in request %s\n%s", name, private_traceback(error))
            response = error_response(internal_error(), scope)
        if not answering.start.done():
            await response(scope, answering.receive, answering.send)

    def _scope(self, relayed: Relayed) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": relayed.method,
            "scheme": "http",
            "path": relayed.path,
            "raw_path": relayed.path.encode(),
            "query_string": relayed.query,
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": (relayed.address, 0) if relayed.address else None,
            "server": None,
            "app": self._app,
            "state": {"request_id": relayed.request_id, "client": relayed.owner},
        }


class _Answering:
    """One request that is being answered: its endpoint's `receive` and `send`."""

    def __init__(self, run: Callable[[_Answering], Awaitable[None]], body: bytes) -> None:
        self.start: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue(_ROOM)
        self._task = asyncio.ensure_future(run(self))

    def cancel(self) -> None:
        self._task.cancel()

    async def rest(self) -> bytes:
        """The whole body."""
        found, is_last = bytearray(), False
        while not is_last:
            piece, is_last = await self._pieces.get()
            found += piece
        return bytes(found)

    async def more(self) -> RelayedMore:
        """Waits for at least one piece and returns all that were sent meanwhile."""
        piece, is_last = await self._pieces.get()
        while not is_last and not self._pieces.empty():
            following, is_last = self._pieces.get_nowait()
            piece += following
        return RelayedMore(piece, is_last)

    async def receive(self) -> Message:
        if self._body is not None:
            data, self._body = self._body, None
            return {"type": "http.request", "body": data, "more_body": False}
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing comes")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start.set_result(message)
            return
        piece = (message.get("body", b""), not message.get("more_body"))
        await asyncio.wait_for(self._pieces.put(piece), _READ_S)
