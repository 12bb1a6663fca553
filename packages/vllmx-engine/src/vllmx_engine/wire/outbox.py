"""Outgoing data of a connection: bytes not yet sent, and merged updates of a slow client."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from vllmx_engine.wire.ipc import Announced, FromCore, Outputs, Stats
from vllmx_engine.wire.messages import CoreOutput, TokenLogprobs, is_piece

MAX_MERGED_BYTES = 64 << 20


class Updates:
    """Messages that wait, in the order in which they may be taken.

    Attributes:
        num_bytes: about what they will be on the wire.
    """

    def __init__(self) -> None:
        self._messages: list[FromCore] = []
        self._updates: dict[str, CoreOutput] = {}
        self._stats: Stats | None = None
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages or self._updates or self._stats)

    def add(self, message: FromCore) -> bool:
        """False when more waits than should."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._add_output(output)
        elif isinstance(message, Stats):
            self._stats = message
        else:
            if isinstance(message, Announced):
                self.num_bytes += len(message.filed) + len(message.evicted)
            self._messages.append(message)
        return self.num_bytes <= MAX_MERGED_BYTES

    def take(self) -> list[FromCore]:
        """All of them; none waits any more."""
        found = self._messages
        if self._updates:
            found.append(Outputs(list(self._updates.values())))
        if self._stats is not None:
            found.append(self._stats)
        self._messages, self._updates, self._stats, self.num_bytes = [], {}, None, 0
        return found

    def _add_output(self, output: CoreOutput) -> None:
        self.num_bytes += _size(output)
        if is_piece(output):  # one of many, each as much as should be decoded at once
            self._messages.append(Outputs([output]))
            return
        before = self._updates.get(output.request_id)
        self._updates[output.request_id] = (
            _own(output) if before is None else _merged(before, output)
        )


def _own(output: CoreOutput) -> CoreOutput:
    """Copies an update, with lists that may grow."""
    return msgspec.structs.replace(
        output,
        ids=[*output.ids],
        logprobs=_joined(None, output.logprobs),
        prompt_logprobs=_joined(None, output.prompt_logprobs),
    )


def _merged(before: CoreOutput, after: CoreOutput) -> CoreOutput:
    """Merges two updates of one request into one, whose lists are those of `before`."""
    before.ids.extend(after.ids)
    return msgspec.structs.replace(
        after,
        ids=before.ids,
        logprobs=_joined(before.logprobs, after.logprobs),
        prompt_logprobs=_joined(before.prompt_logprobs, after.prompt_logprobs),
        num_cached_tokens=max(before.num_cached_tokens, after.num_cached_tokens),
        queue_s=after.queue_s if before.queue_s is None else before.queue_s,
        held_s=max(before.held_s, after.held_s),
        vector=after.vector or before.vector,
        num_accepted=before.num_accepted + after.num_accepted,
        num_rejected=before.num_rejected + after.num_rejected,
    )


def _joined(
    before: list[TokenLogprobs] | None, after: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """The first with the second behind it; None where there is neither."""
    if before is None or after is None:
        return before if after is None else [*after]
    before.extend(after)
    return before


def _size(output: CoreOutput) -> int:
    size = 48 + 9 * len(output.ids) + len(output.vector)
    for entries in (output.logprobs, output.prompt_logprobs):
        if entries:
            each = entries[0]
            size += len(entries) * (32 + 14 * len(each.top_ids) + len(each.packed))
    return size


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
        """Sends or keeps a frame. False when too much waits: the producer must stop."""
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
        """Sends; returns the number of bytes that the kernel took."""
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
