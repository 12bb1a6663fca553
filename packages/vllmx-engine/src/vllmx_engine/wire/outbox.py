"""Frames on their way out of the engine core, whether or not the other side reads them.

A step of the core must never wait for the API process, which may stand still: stopped by a signal,
by a debugger, or busy with something else.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 64 << 20
"""The most bytes that wait behind the frame that is being sent, however large that one is."""


class Outbox:
    """Sends frames over a stream socket, in order and without ever waiting.

    A frame goes straight to the kernel, as if there were no outbox; what the kernel does not take
    is left to a thread that waits in the caller's place. Any thread may put.

    Args:
        connection: blocking.
        on_broken: called when the other side is gone.
        on_sent: called on the thread, when the last frame that waited is sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_broken: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._on_broken = on_broken
        self._on_sent = on_sent
        self._waiting: deque[memoryview] = deque()
        """The first is being sent by the thread, and leaves when it is."""
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing waits: the other side reads."""
        return not self._waiting

    def put(self, frame: bytes | bytearray) -> bool:
        """Sends or keeps a frame. False when too much waits: whoever makes frames must stop."""
        with self._changed:
            sent = 0 if self._waiting else self._send_now(frame)
            if sent == len(frame):
                return True
            self._waiting.append(memoryview(frame)[sent:])
            self._num_bytes += len(frame) - sent
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllmx-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._num_bytes - len(self._waiting[0]) <= MAX_WAITING_BYTES

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is sent; False when the time is up before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _send_now(self, frame: bytes | bytearray) -> int:
        """How many bytes the kernel took."""
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._on_broken()
            return len(frame)  # nobody is left to read it

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                frame = self._waiting[0]
            try:
                self._connection.sendall(frame)
            except OSError:
                self._on_broken()
                self._forget()
                return
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(frame)
                is_empty = not self._waiting
                self._changed.notify_all()
            if is_empty:
                self._on_sent()

    def _forget(self) -> None:
        """Nobody is left to read what waits."""
        with self._changed:
            self._waiting.clear()
            self._num_bytes = 0
            self._thread = None
            self._changed.notify_all()
