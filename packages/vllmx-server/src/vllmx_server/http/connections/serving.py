"""Serves an application on a listening socket: accepts connections within limits, in all and for
each address, until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from vllmx_server.errors import OverloadedError, error_body
from vllmx_server.http.connections.connection import Connection, Shared
from vllmx_server.http.connections.settings import OUT_OF_RESOURCES, SAFE_HEADERS, Timeouts
from vllmx_server.limits.admission import ALONE, Sharing

logger = logging.getLogger("vllmx.server")

_AT_ONCE = 16
"""Connections accepted before the event loop does something else."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of open connections."""

    in_all: int
    per_address: int
    sharing: Sharing = ALONE
    """Counts of other processes that accept connections."""


class Place:
    """The part of the limits that one accepted connection takes."""

    __slots__ = ("address", "close")

    def __init__(self, address: str) -> None:
        self.address = address
        self.close: Callable[[], object]
        """Ends the connection."""


class Listener:
    """Accepts from a listening socket and hands sockets on, with their places.

    A connection over a limit is refused, unless another one is idle: the one that is idle longest
    is closed to make room. CPython's own loop accepts as many at a time as the backlog holds, and
    logs as many errors when it is out of descriptors.
    """

    def __init__(
        self,
        listening: socket.socket,
        limits: ConnectionLimits,
        on_accepted: Callable[[socket.socket, Place], None],
        *,
        refusal: bytes,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._limits = limits
        self._on_accepted = on_accepted
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._places: set[Place] = set()
        self._idle: dict[Place, None] = {}
        self._by_address: Counter[str] = Counter()
        self._complaints = _Complaints()

    def start(self) -> None:
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def stop(self) -> None:
        """Accepts nothing more."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listening.fileno())

    @property
    def idle(self) -> list[Place]:
        """The idle connections, longest first."""
        return list(self._idle)

    def set_idle(self, place: Place, idle: bool) -> None:
        """Notes that a connection begins or ceases to wait for a request."""
        if idle and place in self._places:
            self._idle[place] = None
        else:
            self._idle.pop(place, None)

    def release(self, place: Place) -> None:
        """Frees the place of a connection that has ended."""
        self._idle.pop(place, None)
        if place in self._places:
            self._places.remove(place)
            self._by_address[place.address] -= 1
            self._count(place.address, -1)
            if not self._by_address[place.address]:
                del self._by_address[place.address]

    def _count(self, address: str, change: int) -> None:
        self._limits.sharing.connections.set(len(self._places))
        self._limits.sharing.addresses.add(address, change)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                self._pause(error)
                return
            self._admit(accepted, network_of(accepted.family, address))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        accepted.setblocking(False)
        sharing = self._limits.sharing
        of_address = self._by_address[address] + sharing.addresses.elsewhere(address)
        if address and of_address >= self._limits.per_address:
            self._refuse(accepted, f"{address} has {self._limits.per_address} connections open")
            return
        in_all = len(self._places) + sharing.connections.elsewhere
        if in_all >= self._limits.in_all and not self._make_room():
            self._refuse(accepted, f"{self._limits.in_all} connections are open")
            return
        place = Place(address)
        self._places.add(place)
        self._by_address[address] += 1
        self._count(address, 1)
        self._idle[place] = None
        self._on_accepted(accepted, place)

    def _make_room(self) -> bool:
        """Closes the connection that is idle longest, if there is one."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self._complaints.add("connections that wait for a request are closed for new ones")
        self.release(longest)
        longest.close()
        return True

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        self._complaints.add(f"a connection was refused: {reason}")
        with accepted:
            if not self._refusal:
                return
            try:
                accepted.send(self._refusal)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(1 << 16)  # closing with something unread would destroy the answer
            except OSError:
                pass

    def _pause(self, error: OSError) -> None:
        self._complaints.add(f"no connection can be accepted: {error.strerror}")
        self._make_room()
        self._loop.remove_reader(self._listening.fileno())
        self._resuming = self._loop.call_later(_PAUSE_S, self.start)


class _Complaints:
    """Logs at most one line a second."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._num_left_out = 0

    def add(self, text: str) -> None:
        now = time.monotonic()
        if now < self._silent_until:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} lines like this left out)" if self._num_left_out else ""
        logger.warning("%s%s: see --max-connections in docs/serving.md", text, more)
        self._silent_until, self._num_left_out = now + 1.0, 0


def refusal() -> bytes:
    """The whole answer for a connection that is refused."""
    body = error_body(OverloadedError("too many connections are open: try again later"))
    safe = b"".join(b"%b: %b\r\n" % header for header in SAFE_HEADERS)
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nRetry-After: 1\r\n%bConnection: close\r\n\r\n%b"
        % (len(body), safe, body)
    )


def network_of(family: int, address: object) -> str:
    """The network that a connection comes from: an IPv4 address, or the /64 of IPv6 that one
    customer has; "" on a unix socket."""
    if family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
        return ""
    name = str(address[0]).partition("%")[0]
    if family == socket.AF_INET or name.startswith("::ffff:"):
        return name.removeprefix("::ffff:")
    packed = socket.inet_pton(socket.AF_INET6, name)
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


async def serve(
    app: Any,
    config: Config,
    listening: socket.socket,
    limits: ConnectionLimits,
    timeouts: Timeouts,
    stop: asyncio.Event,
) -> None:
    """Accepts connections until `stop` is set; then they have `config.graceful_timeout` to end. The
    socket stays open for its owner to close."""
    server = _Server(app, config, listening, limits, timeouts)
    try:
        await stop.wait()
    finally:
        await server.close(config.graceful_timeout)


class _Server:
    def __init__(
        self,
        app: Any,
        config: Config,
        listening: socket.socket,
        limits: ConnectionLimits,
        timeouts: Timeouts,
    ) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = WorkerContext(None)
        self._shared = Shared(app, config, self._context, config.create_ssl_context(), timeouts)
        answer = b"" if config.ssl_enabled else refusal()
        self._listener = Listener(listening, limits, self._begin, refusal=answer)
        self._listener.start()

    def _begin(self, accepted: socket.socket, place: Place) -> None:
        connection = Connection(self._shared, partial(self._listener.set_idle, place))
        task = asyncio.ensure_future(connection.run(accepted))
        place.close = task.cancel
        self._tasks.add(task)

        def on_end(task: asyncio.Task[None]) -> None:
            if not connection.began:
                accepted.close()
            self._tasks.discard(task)
            self._listener.release(place)

        task.add_done_callback(on_end)

    async def close(self, timeout_s: float) -> None:
        """Ends idle connections at once, and all others after `timeout_s`."""
        self._listener.stop()
        await self._context.terminated.set()
        for place in self._listener.idle:
            place.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
