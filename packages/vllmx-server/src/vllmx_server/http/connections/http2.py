"""HTTP/2 on one connection: hypercorn's protocol, guarded against broken and hostile clients.

hypercorn ends a connection and all of its streams with the first DATA frame of a stream that was
answered before its body had come, blocks all streams while one application does not read, and
accepts any number of frames. Here

- bodies wait in a queue for each stream, and a stream's flow control window is reopened as its
  application reads. The connection's window is reopened at once: no stream can close it;
- the rest of a body that was already answered is dropped, and its window reopened;
- resets and empty frames have a budget (`FrameBudget`). A client that exceeds it gets GOAWAY with
  ENHANCE_YOUR_CALM. The application never sees a stream that is reset as soon as it is opened;
- a stream whose client does not open its window is reset after a time;
- PRIORITY is ignored, as in RFC 9113; CONNECT and invalid paths get an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.utils import filter_pseudo_headers
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.http.connections.applications import Inbox, run_app
from vllmx_server.http.connections.settings import least_taken


class FrameBudget:
    """A token bucket: `burst` at once, and `per_s` again each second."""

    def __init__(
        self, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._left, self._seen_s = burst, clock()

    def take(self, count: int) -> bool:
        """False if the budget is exceeded."""
        if not count:
            return True
        now_s = self._clock()
        refill = (now_s - self._seen_s) * self._per_s
        self._left = min(self._burst, self._left + refill) - count
        self._seen_s = now_s
        return self._left >= 0

    def give(self, count: int) -> None:
        self._left = min(self._burst, self._left + count)


logger = logging.getLogger("vllmx.server")

_SLICE_BYTES = 8192
"""Bytes that are parsed between two checks of the budget."""
_WINDOW_STEP = 16384
"""Bytes that are owed before a WINDOW_UPDATE is sent: a quarter of a window."""
_SMALL_BYTES = 128
"""A smaller DATA frame is charged like an empty one."""
_DROPPED_BYTES = 64 << 20
"""Bytes of one stream's body that are dropped after its answer; then it is reset."""
_HOP_HEADERS = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding")


class _Stream:
    """Starts the application of one stream, as the task group that hypercorn expects. The messages
    that it has not read hold nobody up: the stream's window bounds them.

    Args:
        group: the connection's tasks.
        on_read: called with the bytes of the body that were read.
        returned: called at the end.
    """

    def __init__(
        self, group: Any, on_read: Callable[[int], Awaitable[None]], returned: Callable[[], None]
    ) -> None:
        self._group, self._on_read, self._returned = group, on_read, returned

    async def spawn_app(
        self, app: Any, config: Any, scope: Any, send: Any
    ) -> Callable[[Any], Awaitable[None]]:
        inbox = Inbox(self._on_read)

        async def run() -> None:
            try:
                await run_app(app, scope, inbox, send)
            finally:
                self._returned()

        self._group.spawn(run)
        return inbox.put


class Http2(H2Protocol):
    """One HTTP/2 connection."""

    RESETS, RESETS_PER_S = 200, 20
    """Streams that end before their answer: by the client's RST_STREAM or by its fault."""
    CONTROLS, CONTROLS_PER_S = 2000, 200
    """PING, SETTINGS, PRIORITY, WINDOW_UPDATE, unknown frames, small DATA."""

    send_timeout_s = 300.0
    """Seconds that a stream's client may take nothing of its answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.config.h2_max_header_list_size,
            },
        )
        self._resets = FrameBudget(self.RESETS, self.RESETS_PER_S)
        self._controls = FrameBudget(self.CONTROLS, self.CONTROLS_PER_S)
        self._owed: Counter[int] = Counter()
        """Bytes to give back to windows; 0 is the connection's."""
        self._dropped: Counter[int] = Counter()
        self._running = 0
        """Applications that have not returned, also those whose stream is gone."""

    # --- receiving --------------------------------------------------------------------------------
    async def handle(self, event: RawData | Closed | Updated) -> None:  # type: ignore[override]
        if isinstance(event, Closed):
            await self._end_streams()
        elif isinstance(event, RawData):
            try:
                await self._receive(event.data)
            except Exception as error:
                await self._fail(error)

    async def _receive(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if start:
                await asyncio.sleep(0)  # other connections have their turn
            if self.closed:
                return
            try:
                events = self.connection.receive_data(data[start : start + _SLICE_BYTES])
            except ProtocolError:  # GOAWAY is ready to be sent
                await self._leave()
                return
            if not self._affordable(events):
                logger.info("an HTTP/2 connection is closed: too many resets or empty frames")
                await self._go_away(ErrorCodes.ENHANCE_YOUR_CALM)
                return
            await self._handle_events(events)

    def _affordable(self, events: Sequence[Event]) -> bool:
        resets = controls = 0
        begun = {event.stream_id for event in events if isinstance(event, RequestReceived)}
        for event in events:
            match event:
                case StreamReset(stream_id=stream_id):
                    begins = stream_id in begun or stream_id in self.streams
                    resets += begins or not event.remote_reset
                    controls += 1
                case DataReceived(data=data):
                    controls += len(data) < _SMALL_BYTES and event.stream_ended is None
                case RequestReceived() | StreamEnded():
                    pass
                case _:
                    controls += 1
        return self._resets.take(resets) and self._controls.take(controls)

    async def _handle_events(self, events: list[Event]) -> None:
        reset = {event.stream_id for event in events if isinstance(event, StreamReset)}
        for event in events:
            match event:
                case RequestReceived(stream_id=stream_id) if stream_id not in reset:
                    await self._begin(event)
                case DataReceived():
                    await self._take_data(event)
                case StreamEnded(stream_id=stream_id) if stream_id in self.streams:
                    await self.streams[stream_id].handle(EndBody(stream_id=stream_id))
                case StreamReset(stream_id=stream_id):
                    await self._drop_stream(stream_id)
                case WindowUpdated(stream_id=stream_id):
                    await self._window_updated(stream_id)
                case RemoteSettingsChanged():
                    if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                        await self._window_updated(None)
                case ConnectionTerminated():
                    await self.send(Closed())
                case PriorityUpdated() | _:
                    pass
        await self._flush()

    # --- streams ----------------------------------------------------------------------------------
    async def _begin(self, event: RequestReceived) -> None:
        headers = dict(event.headers)
        method, path = headers.get(b":method", b""), headers.get(b":path", b"")
        full = self._running >= 2 * self.config.h2_max_concurrent_streams
        if self.context.terminated.is_set() or full:
            self.connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
        elif method == b"CONNECT" or not (method.isascii() and method.isalpha()):
            self._refuse(event.stream_id, 405)
        elif not (path.isascii() and path.startswith((b"/", b"*"))):
            self._refuse(event.stream_id, 400)
        else:
            await self._start(event, method.decode().upper(), path)
            await self.send(Updated(idle=False))

    def _refuse(self, stream_id: int, status: int) -> None:
        headers = [(b":status", b"%d" % status), (b"content-length", b"0")]
        headers += self.config.response_headers("h2")
        self.connection.send_headers(stream_id, headers, end_stream=True)

    async def _start(self, event: RequestReceived, method: str, path: bytes) -> None:
        stream_id = event.stream_id
        read = partial(self._give_back, stream_id)
        group: Any = _Stream(self.task_group, read, self._returned)
        stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        self.streams[stream_id] = stream
        self.stream_buffers[stream_id] = StreamBuffer(self.context.event_class)
        self.priority.insert_stream(stream_id)
        self.priority.block(stream_id)
        self._running += 1
        request = Request(
            stream_id=stream_id,
            headers=filter_pseudo_headers(event.headers),
            http_version="2",
            method=method,
            raw_path=path,
            state=self.connection_state,
        )
        await stream.handle(request)
        await self.context.mark_request()

    def _returned(self) -> None:
        self._running -= 1

    async def _take_data(self, event: DataReceived) -> None:
        stream_id, size = event.stream_id, event.flow_controlled_length
        await self._give_back(0, size)
        stream = self.streams.get(stream_id)
        if stream is not None:
            await self._give_back(stream_id, size - len(event.data))
            await stream.handle(Body(stream_id=stream_id, data=event.data))
            return
        self._dropped[stream_id] += size
        if event.stream_ended is not None:
            self._forget(stream_id)
        elif self._dropped[stream_id] < _DROPPED_BYTES:
            await self._give_back(stream_id, size)
        else:
            self._forget(stream_id)
            with suppress(ProtocolError):
                self.connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    async def _give_back(self, stream_id: int, size: int) -> None:
        """Reopens the window of a stream, or of the connection (0), by so many bytes, a
        `_WINDOW_STEP` at a time."""
        if not size or self.closed:
            return
        self._owed[stream_id] += size
        if self._owed[stream_id] >= _WINDOW_STEP:
            with suppress(ProtocolError, KeyError):  # the stream may be gone
                self.connection.increment_flow_control_window(
                    self._owed.pop(stream_id), stream_id or None
                )
                await self._flush()

    def _forget(self, stream_id: int) -> None:
        self._owed.pop(stream_id, None)
        self._dropped.pop(stream_id, None)

    async def _close_stream(self, stream_id: int) -> None:
        self._forget(stream_id)
        await super()._close_stream(stream_id)

    async def _drop_stream(self, stream_id: int) -> None:
        """Ends a stream without an answer; after the last one the connection is idle."""
        if stream_id in self.streams:
            await super().stream_send(StreamClosed(stream_id=stream_id))
        self._forget(stream_id)
        await self._window_updated(stream_id)

    # --- sending ----------------------------------------------------------------------------------
    async def stream_send(self, event: StreamEvent) -> None:
        if self.closed:  # silently: an update would start the wait for another request
            if isinstance(event, StreamClosed):
                await self._close_stream(event.stream_id)
            return
        if isinstance(event, Response):
            headers = [item for item in event.headers if item[0] not in _HOP_HEADERS]
            event = replace(event, headers=headers)
        elif isinstance(event, Body):  # its reader will send updates of its windows
            self._controls.give(4 + len(event.data) // 4096)
        if self._may_wait(event):
            await self._send_in_time(event)
        else:
            await super().stream_send(event)

    def _may_wait(self, event: StreamEvent) -> bool:
        """True if sending it waits until the client takes something."""
        if isinstance(event, Body):
            buffer = self.stream_buffers.get(event.stream_id)
            return buffer is not None and len(buffer.buffer) + len(event.data) >= BUFFER_HIGH_WATER
        return isinstance(event, EndBody)

    async def _send_in_time(self, event: StreamEvent) -> None:
        """Resets the stream if its client takes too little in `send_timeout_s`."""
        loop = asyncio.get_running_loop()
        left_bytes = 1 << 62
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal left_bytes, timer
            buffer = self.stream_buffers.get(event.stream_id)
            before, left_bytes = left_bytes, 0 if buffer is None else len(buffer.buffer)
            if before - left_bytes >= least_taken(self.send_timeout_s):
                timer = loop.call_later(self.send_timeout_s, look)
            else:
                self.task_group.spawn(self._abandon, event.stream_id)

        timer = loop.call_later(self.send_timeout_s, look)
        try:
            await super().stream_send(event)
        finally:
            timer.cancel()

    async def _abandon(self, stream_id: int) -> None:
        """Ends a stream whose client takes nothing of its answer."""
        with suppress(ProtocolError):
            self.connection.reset_stream(stream_id, ErrorCodes.CANCEL)
        if (buffer := self.stream_buffers.get(stream_id)) is not None:
            await buffer.close()
        await self._drop_stream(stream_id)
        await self._flush()

    async def send_task(self) -> None:
        try:
            await super().send_task()
        except Exception as error:
            await self._fail(error)

    # --- the end ----------------------------------------------------------------------------------
    async def _fail(self, error: Exception) -> None:
        """Logs a bug of ours or of a library and closes this connection."""
        logger.error("an HTTP/2 connection failed\n%s", private_traceback(error))
        await self._go_away(ErrorCodes.INTERNAL_ERROR)

    async def _go_away(self, code: ErrorCodes) -> None:
        with suppress(ProtocolError):
            self.connection.close_connection(code)
        await self._leave()

    async def _leave(self) -> None:
        """Sends what is ready, as far as the client reads it, and closes the connection."""
        if not self.closed:
            await self._end_streams()
            await self.send(Updated(idle=True))
            await self._flush()
            await self.send(Closed())

    async def _end_streams(self) -> None:
        self.closed = True
        for stream_id in list(self.streams):
            await self._close_stream(stream_id)
        for buffer in list(self.stream_buffers.values()):
            await buffer.close()  # ends the wait of applications for their windows
        await self.has_data.set()
