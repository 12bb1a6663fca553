"""A core that another process started: reached by its socket, and found again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Protocol

from vllmx_core.errors import EngineDeadError, VllmxError

from vllmx_engine.link.frontend import (
    ASLEEP,
    SEND_AGAIN,
    CoreFrontend,
    Heartbeat,
    Listener,
    lost_with,
)
from vllmx_engine.wire.ipc import (
    Failed,
    FrameError,
    FrameReader,
    FromCore,
    Ping,
    Pong,
    Ready,
    ToCore,
    encode_frame,
    from_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.supervisor")

_UNTOLD = "the engine core ended"
"""The error of a core that ended without a reported cause."""


class Place(Protocol):
    """The place of a core, and the way to connect to it."""

    again_s: float
    """Seconds between two attempts."""

    async def connected(self) -> socket.socket:
        """Raises OSError if a retry may succeed, and a VllmxError if none will."""
        ...

    def local(self, info: CoreInfo) -> CoreInfo:
        """The description that the core gives of itself, as it holds on this host."""
        ...


class LocalCore:
    """A core of this host.

    Args:
        path: of its listening socket, see `CoreListener`. The process that made it restarts the
            core when it dies; once the socket is gone, so is the core.
    """

    again_s = 0.05

    def __init__(self, path: Path) -> None:
        self._path = path

    async def connected(self) -> socket.socket:
        """See `Place.connected`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(self._path))
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not self._path.exists():
                raise EngineDeadError("the engine core was ended by its supervisor") from None
            raise
        return connection

    def local(self, info: CoreInfo) -> CoreInfo:
        """See `Place.local`."""
        return info


class AttachedFrontend(CoreFrontend):
    """A client among several of one core, which it neither starts nor ends."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self._line: _Line | None = None
        self._cause: VllmxError | None = None
        """The error that ended the core, once it was reported."""
        self._reattaching: asyncio.Task[None] | None = None
        self._heartbeat = Heartbeat(lambda: self._send(Ping()))
        self.status = "restarting"

    @classmethod
    async def start(cls, place: Path | Place, told: Listener | None = None) -> AttachedFrontend:
        """Returns when the core at a place, or behind the socket of a path, serves; `told` hears
        what it says first. Raises what `Place.connected` raises."""
        frontend = cls(LocalCore(place) if isinstance(place, Path) else place)
        await frontend.begin(told)
        return frontend

    async def begin(self, told: Listener | None) -> None:
        """The second half of `start`."""
        self.listener = told
        await self._attach()
        self._heartbeat.start()

    @property
    def silent_s(self) -> float:
        return self._heartbeat.silent_s if self.status == "ready" else 0.0

    def note(self, cause: VllmxError) -> None:
        """Takes what ended the core from the supervisor, which may come before the end of the
        connection does."""
        self._cause, self._last_reason = cause, cause.message
        if self.status == "restarting" and cause.message == ASLEEP:
            self.status = "asleep"

    def unavailable(self) -> EngineDeadError:
        if self.status == "restarting":
            return EngineDeadError(
                f"the engine core is being restarted ({self._last_reason}): try again in a moment"
            )
        return super().unavailable()

    async def close(self) -> None:
        """Disconnects from the core, which aborts this client's requests."""
        if self.status == "closed":
            return
        self.status = "closed"
        self._heartbeat.stop()
        if self._reattaching is not None:
            self._reattaching.cancel()
            await asyncio.wait([self._reattaching])
        if self._line is not None:
            self._line.close()

    def _send(self, message: ToCore) -> None:
        if self._line is not None:
            self._line.send(message)

    def _take(self, message: FromCore) -> None:
        self._heartbeat.heard()
        match message:
            case Failed(error):
                self.note(error.rebuild())
                if self._line is not None:
                    self._line.close()  # its end may be long in coming
            case Pong():
                pass
            case _:
                super()._take(message)

    async def _attach(self) -> None:
        """Raises the VllmxError of a place where there will be no core."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection = await self._place.connected()
                _, line = await loop.create_connection(lambda: _Line(self), sock=connection)
            except OSError:
                await asyncio.sleep(self._place.again_s)
                continue
            try:
                info = await line.ready
            except BaseException:
                line.close()
                raise
            if info is not None:
                self._line, self.status = line, "ready"
                self.info = self._place.local(info)
                self._cause, self._last_reason = None, _UNTOLD
                self._heartbeat.heard()
                return
            await asyncio.sleep(self._place.again_s)

    def _on_lost(self, line: _Line) -> None:
        if line is not self._line or self.status == "closed":
            return
        self._line = None
        self.status = "asleep" if self._last_reason == ASLEEP else "restarting"
        cause = self._cause or EngineDeadError(_UNTOLD)
        again = "" if self.status == "asleep" else SEND_AGAIN
        self._tell_lost(lost_with(cause, cause.message + again))
        self._reattaching = asyncio.ensure_future(self._reattach())

    async def _reattach(self) -> None:
        try:
            await self._attach()
        except VllmxError as error:
            self._give_up(error.message)
            return
        if self.listener is not None:
            self.listener.restarted(self.info)


class _Line(asyncio.Protocol):
    """One connection to the core.

    Attributes:
        ready: what the core is, or None where the connection ended before it said so.
    """

    def __init__(self, frontend: AttachedFrontend) -> None:
        self.ready: asyncio.Future[CoreInfo | None] = asyncio.get_running_loop().create_future()
        self._frontend = frontend
        self._reader: FrameReader[FromCore] = FrameReader(from_core_decoder)
        self._transport: asyncio.WriteTransport | None = None

    def send(self, message: ToCore) -> None:
        frame = encode_frame(message)
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if isinstance(message, Ready):
                    if not self.ready.done():
                        self.ready.set_result(message.info)
                else:
                    self._frontend._take(message)
        except FrameError as error:
            logger.error("the engine core sent %s: leaving it", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.ready.done():
            self.ready.set_result(None)
        self._frontend._on_lost(self)
