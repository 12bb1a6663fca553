"""Questions and answers between the supervisor and a worker, over a socket that both have.

Either side may ask. What is asked for is a name and plain msgspec data; what a side answers to it
is a function that it registered. A name that is added needs nothing here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.system.private_traceback import private_traceback
from vllmx_engine.wire.ipc import FrameError, FrameReader, encode_frame

from vllmx_server.errors import internal_error
from vllmx_server.host.workers.refusal import ErrorSent

logger = logging.getLogger("vllmx.server")

T = TypeVar("T")
R = TypeVar("R")
_encode = msgspec.msgpack.Encoder().encode
_NOTHING = msgspec.Raw(_encode(None))


class Question(msgspec.Struct, frozen=True, tag="question", array_like=True):
    """Answered by an Answer or a Refusal of the same number, unless that is 0."""

    number: int
    name: str
    body: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """What the other side's function returned."""

    number: int
    body: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, tag="refusal", array_like=True):
    """The error that a question raised."""

    number: int
    error: ErrorSent


Spoken = Question | Answer | Refusal
_decoder: msgspec.msgpack.Decoder[Spoken] = msgspec.msgpack.Decoder(Spoken)


class GoneError(EngineDeadError):
    """The other side's process has ended."""


class Channel(asyncio.Protocol):
    """One side's end.

    Attributes:
        gone: set when the other side is.
    """

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._reader: FrameReader[Spoken] = FrameReader(_decoder)
        self._transport: asyncio.WriteTransport | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._functions: dict[str, tuple[Any, Callable[[Any], Awaitable[object]]]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(cls, connection: socket.socket) -> Channel:
        """An end over one of a pair of stream sockets."""
        channel = cls()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: channel, sock=connection)
        return channel

    def serve(self, name: str, kind: type[T], function: Callable[[T], Awaitable[object]]) -> None:
        """Answers questions of this name by `function`, several at a time."""
        self._functions[name] = (kind, function)

    async def ask(self, name: str, body: object, kind: type[R]) -> R:
        """What the other side's function returns. Raises what it raises where that is an error of
        ours, and GoneError."""
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(Question(number, name, msgspec.Raw(_encode(body))))
            return msgspec.msgpack.decode(await answer, type=kind)
        finally:
            self._asked.pop(number, None)

    def tell(self, name: str, body: object) -> None:
        """Asks without caring for an answer, nor for whether anybody is there."""
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
            found = await function(msgspec.msgpack.decode(question.body, type=kind))
            body = _NOTHING if found is None else msgspec.Raw(_encode(found))
            reply: Spoken = Answer(question.number, body)
        except VllmxError as error:
            reply = Refusal(question.number, ErrorSent.of(error))
        except Exception as error:
            logger.error("%s between processes failed\n%s", question.name, private_traceback(error))
            reply = Refusal(question.number, ErrorSent.of(internal_error()))
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
