"""Answers the lines of a batch and writes the answers to the database."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.apis.batches.files import Files
from vllmx_server.apis.batches.input import read_line
from vllmx_server.apis.batches.store import Batch, Batches, Line, LineState
from vllmx_server.errors import error_response, internal_error
from vllmx_server.http.connections.applications import Client
from vllmx_server.limits.admission import GIVEN_BODY
from vllmx_server.schema.record import encode
from vllmx_server.store.database import logger

Item = tuple[str, int, LineState, bytes]
_GATHER_S = 0.05
"""Seconds that answers wait for others, so that they share a transaction."""


class AnswerWriter:
    """Writes answers together: they gather for a moment, and while others are being written."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._items: list[Item] = []
        self._writing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def write(self, item: Item) -> None:
        """Returns when it is kept; cancelling does not take it back. Raises StorageError."""
        self._items.append(item)
        if self._next is None:
            self._next = asyncio.ensure_future(self._flush(self._writing))
            self._next.add_done_callback(_retrieve)
        await asyncio.shield(self._next)

    async def finish(self) -> None:
        """Returns when all is kept that can be, whether or not anybody waits for it."""
        under_way = [task for task in (self._writing, self._next) if task is not None]
        if under_way:
            await asyncio.wait(under_way)

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        await asyncio.sleep(_GATHER_S)
        if before is not None:
            await asyncio.wait((before,))
        items, self._items = self._items, []
        self._writing, self._next = self._next, None
        await self._batches.add_answers(items)


def _retrieve(task: asyncio.Task[None]) -> None:
    """An error that all who waited for it have left is not reported."""
    if not task.cancelled():
        task.exception()


_PAGE = 64
_PAUSE_S = 0.2
_READ_BYTES = 1 << 20
_MAX_LOSSES = 3
"""A line that is being answered whenever the engine dies is given up then."""
_ENGINE_LOST = ("engine_unavailable", "step_timeout")


class LineRunner:
    """Answers lines of any batches.

    Args:
        is_ready: whether the engine takes requests.
    """

    def __init__(
        self,
        batches: Batches,
        files: Files,
        answerer: LineAnswerer,
        slots: LineSlots,
        is_ready: Callable[[], bool],
    ) -> None:
        self._batches = batches
        self._files = files
        self._answerer = answerer
        self._slots = slots
        self._writer = AnswerWriter(batches)
        self._is_ready = is_ready
        self._suspects = asyncio.Lock()

    async def run(self, batch: Batch, path: Path) -> None:
        """Returns when every line of the batch has an answer; cancelling takes out of the engine
        what has none. Raises StorageError."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while await self._begin_all(batch, path, tasks):
                await asyncio.gather(*tasks)
                tasks.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Returns when all answers are kept that can be."""
        await self._writer.finish()

    async def _begin_all(self, batch: Batch, path: Path, tasks: set[asyncio.Task[None]]) -> bool:
        """True if there were any."""
        after = 0
        while page := await self._batches.waiting(batch.id, after, _PAGE):
            for lines in _together(page):
                data = await self._files.on_thread(partial(_read, path, lines))
                for line in lines:
                    start = line.start - lines[0].start
                    record = data[start : start + line.length]
                    after = line.number
                    await self._slots.take()
                    tasks.add(asyncio.ensure_future(self._answer(batch, line, record)))
                    await asyncio.sleep(0)  # others are served between the beginnings of two lines
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
        return after > 0

    async def _answer(self, batch: Batch, line: Line, data: bytes) -> None:
        """Answers a line in a place that it has, and gives the place back."""
        try:
            request = read_line(data)
            answer = await self._attempt(batch, line, request.url, bytes(request.body))
        finally:
            self._slots.leave()
        if answer is None:
            text = f"the engine ended {_MAX_LOSSES} times while this line was being answered"
            state, record = LineState.FAILED, unanswered(line.custom_id, "engine_lost", text)
        else:
            state, record = answer.state, answer.record(line.custom_id)
        await self._writer.write((batch.id, line.number, state, record))
        if state is LineState.ANSWERED:
            batch.completed += 1
        else:
            batch.failed += 1

    async def _attempt(self, batch: Batch, line: Line, url: str, body: bytes) -> Answer | None:
        """None: the engine was lost too often."""
        losses = line.losses
        while losses < _MAX_LOSSES:
            while not self._is_ready():
                await asyncio.sleep(_PAUSE_S)
            if losses:
                async with self._suspects:  # so that the guilty one does not take others along
                    answer = await self._answerer.answer(url, body, batch.owner)
            else:
                answer = await self._answerer.answer(url, body, batch.owner)
            if answer.code in _ENGINE_LOST:
                losses += 1
                await self._batches.count_loss(batch.id, line.number)
            elif answer.status not in (429, 503):
                return answer
            await asyncio.sleep(_PAUSE_S)
        return None


def _together(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Lines that are read at once: a turn of a thread costs as much as a third of a short answer.
    Answered lines between two of them are read as well."""
    held: list[Line] = []
    for line in lines:
        if held and line.start + line.length - held[0].start > _READ_BYTES:
            yield held
            held = []
        held.append(line)
    if held:
        yield held


def _read(path: Path, lines: Sequence[Line]) -> bytes:
    start, last = lines[0].start, lines[-1]
    with path.open("rb") as file:
        file.seek(start)
        return file.read(last.start + last.length - start)


_LOOK_S = 0.05
"""Seconds between two looks for a place that another request left."""


class LineSlots:
    """LineSlots are given in the order in which they were asked for.

    Args:
        rows: sequences that the engine runs together.
        num_others: requests in flight that take none of these slots.
    """

    def __init__(self, rows: Callable[[], int], num_others: Callable[[], int]) -> None:
        self._rows = rows
        self._num_others = num_others
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = True
        self.num_taken = 0

    async def take(self) -> None:
        """Waits for a place, which `leave` gives back."""
        if not self._waiting and self._has_place():
            self.num_taken += 1
            return
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(asked)
        self._look_again()
        try:
            await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled():
                self.leave()
            elif asked in self._waiting:  # `_give` may have met it before this task ran again
                self._waiting.remove(asked)
            raise

    def leave(self) -> None:
        """Gives a place back."""
        self.num_taken -= 1
        self._give()

    def _has_place(self) -> bool:
        """True if there is a place. More are given than rows are free, so that a row that ends has
        a successor in the engine's queue, and several at a time: what begins a line is fastest
        where it has just begun another one. One is where nothing is free, so that batches end some
        day."""
        free = max(0, self._rows() - self._num_others())
        left = free + free // 2 + 1 - self.num_taken
        self._is_open = left > 0 and (self._is_open or left > free // 4)
        return self._is_open

    def _give(self) -> None:
        while self._waiting and self._has_place():
            asked = self._waiting.popleft()
            if not asked.done():
                self.num_taken += 1
                asked.set_result(None)

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._give()
        if self._waiting:
            self._look_again()


Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Answer(msgspec.Struct, frozen=True):
    """The answer of a route."""

    status: int
    request_id: str
    body: bytes
    code: str | None = None
    """The code of its error."""

    @property
    def state(self) -> LineState:
        return LineState.ANSWERED if self.status < 400 else LineState.FAILED

    def record(self, custom_id: str) -> bytes:
        """A line of the output, or of the errors."""
        response = {
            "status_code": self.status,
            "request_id": self.request_id,
            "body": msgspec.Raw(self.body),
        }
        return _record(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """A line of the errors for a request that nobody answered."""
    return _record(custom_id, None, {"code": code, "message": message})


def _record(custom_id: str, response: Any, error: Any) -> bytes:
    name = f"batch_req_{os.urandom(16).hex()}"
    record = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return encode(record).replace(b"\n", b" ") + b"\n"  # JSON has them between values alone


class _Peek(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


_PEEK = msgspec.json.Decoder(_Peek)


class LineAnswerer:
    """Calls routes without a connection.

    Args:
        app: the application that they belong to.
        endpoints: by path.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def answer(self, url: str, body: bytes, owner: str) -> Answer:
        """Calls the route. Raises nothing but CancelledError, which ends the work."""
        request_id = os.urandom(16).hex()
        scope = self._scope(url, body, owner, request_id)
        collected = _Collected()
        code: str | None = None
        try:
            _check_peek(body)
            request = Request(scope, collected.receive)
            response = await self._endpoints[url](request)
        except VllmxError as error:
            response, code = error_response(error, scope), error.code
        except Exception as error:
            response = self._bug(scope, error)
        try:
            await response(scope, collected.receive, collected.send)
        except VllmxError as error:
            shown: Response = error_response(error, scope)
            return Answer(shown.status_code, request_id, bytes(shown.body), error.code)
        except Exception as error:
            shown = self._bug(scope, error)
            return Answer(shown.status_code, request_id, bytes(shown.body))
        return Answer(collected.status, request_id, bytes(collected.body), code)

    def _bug(self, scope: Scope, error: Exception) -> Response:
        request_id, where = scope["state"]["request_id"], private_traceback(error)
        logger.error("unhandled error in request %s of a batch\n%s", request_id, where)
        return error_response(internal_error(), scope)

    def _scope(self, url: str, body: bytes, owner: str, request_id: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": None,
            "server": None,
            "app": self._app,
            "state": {
                "request_id": request_id,
                "client": owner,
                "is_batch": True,
                GIVEN_BODY: body,
            },
        }


def _check_peek(body: bytes) -> None:
    try:
        found = _PEEK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the route says what is wrong with it
    for name in ("stream", "background"):
        if getattr(found, name):
            raise InvalidRequestError(f"{name}: a batch is not streamed, leave it out", param=name)


class _Collected(Client):
    """The connection that a route sees: nothing comes from a client that never leaves."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing comes")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
