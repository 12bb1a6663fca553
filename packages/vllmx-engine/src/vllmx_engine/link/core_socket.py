"""The core's end of a socket to one of its clients."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from vllmx_engine.wire.ipc import (
    FrameReader,
    FrameTooLargeError,
    FromCore,
    Outputs,
    ToCore,
    encode_frame,
    to_core_decoder,
)
from vllmx_engine.wire.messages import CoreOutput
from vllmx_engine.wire.outbox import Outbox
from vllmx_engine.wire.updates import Updates

_RECEIVE_BYTES = 1 << 18
_FAREWELL_S = 2.0
_LOOK_S = 0.005


class CoreSocket:
    """Messages over a connected socket. Any thread may send; one receives.

    What a client that reads is sent goes straight to the kernel. For one that does not, what comes
    later is merged until it reads again.

    Args:
        on_broken: called when a message finds nobody to read it.
    """

    def __init__(self, connection: socket.socket, on_broken: Callable[[], None]) -> None:
        self._socket = connection
        self._updates = Updates()
        self._lock = threading.Lock()
        self._outbox = Outbox(connection, on_broken, self._send_updates)

    def messages(self) -> Iterator[ToCore]:
        """Messages as they come, until the other side is gone. Raises FrameError."""
        reader: FrameReader[ToCore] = FrameReader(to_core_decoder)
        while data := self._socket.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)

    def send(self, message: FromCore) -> bool:
        """Sends a message and never waits. Returns False when the other side has not read for so
        long that nothing more should be made for it."""
        with self._lock:
            if self._updates or not self._outbox.is_empty:
                return self._updates.add(message)
            return self._put(message)

    def flush(self) -> None:
        """Gives the other side a moment to read the last words."""
        until_s = time.monotonic() + _FAREWELL_S
        while self._outbox.flush(until_s - time.monotonic()) and self._updates:
            time.sleep(_LOOK_S)  # until the outbox's thread has taken them

    def close(self) -> None:
        """Wakes whoever receives, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_updates(self) -> None:
        with self._lock:
            for message in self._updates.take():
                self._put(message)

    def _put(self, message: FromCore) -> bool:
        try:
            frame = encode_frame(message)
        except FrameTooLargeError:
            if not isinstance(message, Outputs):
                raise
            taken = [self._put(part) for part in _smaller(message)]
            return all(taken)
        return self._outbox.put(frame)


def _smaller(message: Outputs) -> list[Outputs]:
    """The same updates in two messages; one that is too large alone becomes an error."""
    outputs = message.outputs
    if len(outputs) > 1:
        middle = len(outputs) // 2
        return [Outputs(outputs[:middle]), Outputs(outputs[middle:])]
    return [
        Outputs(
            [
                CoreOutput(
                    request_id=outputs[0].request_id,
                    ids=[],
                    finish_reason="error",
                    error="the log-probabilities of this request are too large to be sent: ask for"
                    " fewer prompt_logprobs or shorten the prompt",
                    error_code="invalid_request",
                )
            ]
        )
    ]
