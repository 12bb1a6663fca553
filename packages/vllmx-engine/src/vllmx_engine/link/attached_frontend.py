"""A core that another process started: reached by its socket, and found again when it dies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from vllmx_core.errors import EngineDeadError, VllmxError

from vllmx_engine.link.frontend import ASLEEP, SEND_AGAIN, CoreFrontend, Heartbeat, lost_with
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

_AGAIN_S = 0.05
_UNTOLD = "the engine core ended"
"""The error of a core that ended without a reported cause."""


class AttachedFrontend(CoreFrontend):
    """A client among several of one core, which it neither starts nor ends.

    Args:
        path: of the core's listening socket, see `CoreListener`. The process that made it
            restarts the core when it dies; once the socket is gone, so is the core.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._line: _Line | None = None
        self._cause: VllmxError | None = None
        """The error that ended the core, once it was reported."""
        self._reattaching: asyncio.Task[None] | None = None
        self._heartbeat = Heartbeat(lambda: self._send(Ping()))
        self.status = "restarting"

    @classmethod
    async def start(cls, path: Path) -> AttachedFrontend:
        """Returns when the core serves. Raises EngineDeadError when the socket is gone."""
        frontend = cls(path)
        await frontend._attach()
        frontend._heartbeat.start()
        return frontend

    @property
    def silent_s(self) -> float:
        """See `Frontend.silent_s`."""
        return self._heartbeat.silent_s if self.status == "ready" else 0.0

    def note(self, cause: VllmxError) -> None:
        """Takes what ended the core from the supervisor, which may come before the end of the
        connection does."""
        self._cause, self._last_reason = cause, cause.message
        if self.status == "restarting" and cause.message == ASLEEP:
            self.status = "asleep"

    def unavailable(self) -> EngineDeadError:
        """See `Frontend.unavailable`."""
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
        """Raises EngineDeadError once the socket is gone."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, line = await loop.create_unix_connection(lambda: _Line(self), str(self._path))
            except OSError:
                if not self._path.exists():
                    raise EngineDeadError("the engine core was ended by its supervisor") from None
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                info = await line.ready
            except BaseException:
                line.close()
                raise
            if info is not None:
                self._line, self.info, self.status = line, info, "ready"
                self._cause, self._last_reason = None, _UNTOLD
                self._heartbeat.heard()
                return
            await asyncio.sleep(_AGAIN_S)

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
        except EngineDeadError as error:
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
