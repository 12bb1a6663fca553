"""Calls between the supervisor and a worker, over a socket pair.

Either side may call the functions that the other one serves, by name and with one argument of plain
msgspec data. Errors cross as data.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from vllmx_core import errors as core_errors
from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.system.private_traceback import private_traceback
from vllmx_engine.wire.ipc import FrameError, FrameReader, encode_frame

from vllmx_server import errors


class ErrorSent(msgspec.Struct, frozen=True):
    """An error, with all that the client sees of it."""

    type: str
    message: str
    code: str
    http_status: int
    param: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] | None = None

    @classmethod
    def of(cls, error: VllmxError) -> ErrorSent:
        return cls(
            type(error).__name__,
            error.message,
            error.code,
            error.http_status,
            error.param,
            getattr(error, "retry_after_s", None),
            getattr(error, "headers", None),
        )

    def rebuild(self) -> VllmxError:
        """The same error; a VllmxError where its type is not known here."""
        error = _kind(self.type)(self.message, param=self.param)
        error.code, error.http_status = self.code, self.http_status
        if self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s  # type: ignore[attr-defined]
        if self.headers is not None:
            error.headers = self.headers  # type: ignore[attr-defined]
        return error


def _kind(name: str) -> type[VllmxError]:
    found = getattr(errors, name, None) or getattr(core_errors, name, None)
    if isinstance(found, type) and issubclass(found, VllmxError):
        return found
    return VllmxError


logger = logging.getLogger("vllmx.server")

R = TypeVar("R")
_encode = msgspec.msgpack.Encoder().encode


class Question(msgspec.Struct, frozen=True, tag="question", array_like=True):
    """Answered by an Answer or a Refusal of the same number, unless that is 0."""

    number: int
    name: str
    body: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The result of a call."""

    number: int
    body: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, tag="refusal", array_like=True):
    """The error that a call raised."""

    number: int
    error: ErrorSent


Spoken = Question | Answer | Refusal
_decoder: msgspec.msgpack.Decoder[Spoken] = msgspec.msgpack.Decoder(Spoken)


class GoneError(EngineDeadError):
    """The other side's process has ended."""


class Channel(asyncio.Protocol):
    """One end of a socket pair.

    Attributes:
        gone: set when the other side is.
    """

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._reader: FrameReader[Spoken] = FrameReader(_decoder)
        self._transport: asyncio.WriteTransport | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._functions: dict[str, tuple[Any, Callable[..., object]]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(cls, connection: socket.socket) -> Channel:
        """An end over one of a pair of stream sockets."""
        channel = cls()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: channel, sock=connection)
        return channel

    def serve(self, **functions: Callable[..., object]) -> None:
        """Answers by these functions from now on, several calls at a time. Each takes nothing or
        one argument, whose annotation is its type, and may return an awaitable."""
        for name, function in functions.items():
            parameters = inspect.signature(function, eval_str=True).parameters.values()
            kind = next((each.annotation for each in parameters), None)
            self._functions[name] = (kind, function)

    async def ask(self, name: str, body: object, kind: type[R]) -> R:
        """Calls a function of the other side; `kind` is the type of its result. Raises its
        VllmxError, and GoneError."""
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(Question(number, name, msgspec.Raw(_encode(body))))
            return msgspec.msgpack.decode(await answer, type=kind)
        finally:
            self._asked.pop(number, None)

    def tell(self, name: str, body: object) -> None:
        """Calls without waiting for a result, or for whether anybody is there."""
        if self._transport is not None:
            self._send(Question(0, name, msgspec.Raw(_encode(body))))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- inside -----------------------------------------------------------------------------------
    def _send(self, message: Spoken) -> None:
        if self._transport is None:
            raise GoneError("a process of the server has ended: send the request again")
        self._transport.write(encode_frame(message))

    async def _answer(self, question: Question) -> None:
        try:
            kind, function = self._functions[question.name]
            body = () if kind is None else (msgspec.msgpack.decode(question.body, type=kind),)
            found = function(*body)
            if inspect.isawaitable(found):
                found = await found
            reply: Spoken = Answer(question.number, msgspec.Raw(_encode(found)))
        except VllmxError as error:
            reply = Refusal(question.number, ErrorSent.of(error))
        except Exception as error:
            logger.error("%s between processes failed\n%s", question.name, private_traceback(error))
            reply = Refusal(question.number, ErrorSent.of(errors.internal_error()))
        if question.number and self._transport is not None:
            self._send(reply)

    # --- asyncio.Protocol -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except FrameError as error:
            logger.error("a process of the server sent %s", error)
            self.close()

    def _take(self, message: Spoken) -> None:
        if isinstance(message, Question):
            task = asyncio.ensure_future(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        asked = self._asked.pop(message.number, None)
        if asked is None or asked.done():  # who asked has given up
            return
        if isinstance(message, Answer):
            asked.set_result(message.body)
        else:
            asked.set_exception(message.error.rebuild())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.gone.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(GoneError("a process of the server has ended: try again"))
