"""Limits of the whole server: requests in flight, and bytes of bodies in memory.

Each process counts its own and reads the counts of the others, so a limit may be exceeded by as
many as there are processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from vllmx_engine.text.gauge import Alone, AloneByName, Gauge, NamedGauge

from vllmx_server.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class Sharing:
    """A gauge for each limit. By default this process is the whole server."""

    connections: Gauge = field(default_factory=Alone)
    addresses: NamedGauge = field(default_factory=AloneByName)
    """Connections of each network address."""
    requests: Gauge = field(default_factory=Alone)
    """Generation requests in flight."""
    bodies: Gauge = field(default_factory=Alone)
    """Bytes of bodies that are being read."""
    clients: NamedGauge = field(default_factory=AloneByName)
    """Bytes of the bodies of each client that are being read."""
    texts: Gauge = field(default_factory=Alone)
    """Bytes of texts that wait for a thread."""
    sequences: Callable[[str], Gauge] = lambda model: Alone()
    """Sequences of a model in flight."""


ALONE = Sharing()
"""The sharing of a server that has no other process."""


class Admission:
    """Counts generation requests from their admission to the end of their answers.

    Args:
        limit: requests in flight in the whole server.
        gauge: shared with other processes.

    Attributes:
        draining: no request is admitted any more.
        in_flight: requests of this process.
    """

    def __init__(self, limit: int, gauge: Gauge) -> None:
        self._limit = limit
        self._gauge = gauge
        self._idle = asyncio.Event()
        self.draining = False
        self.in_flight = 0

    def check(self) -> None:
        """Raises OverloadedError while draining and over the limit."""
        if self.draining:
            raise OverloadedError("the server is shutting down: send the request to another one")
        in_flight = self.in_flight + self._gauge.elsewhere
        if in_flight >= self._limit:
            raise OverloadedError(
                f"{in_flight} requests are in flight, the limit is {self._limit}: try again later,"
                " or raise --max-concurrent-requests"
            )

    def enter(self) -> None:
        self.in_flight += 1
        self._gauge.set(self.in_flight)

    def leave(self) -> None:
        self.in_flight -= 1
        self._gauge.set(self.in_flight)
        if self.draining and not self.in_flight:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing and waits until every answer has been sent; False on timeout."""
        self.draining = True
        if self.in_flight:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True


GIVEN_BODY = "body"
"""The key in a request's state of a body that did not come by a connection, and is not counted."""
_FREE_BYTES = 64 << 10
"""The bytes of each body that are not counted, so that small requests are never refused for the
bodies of others. The limit of connections bounds their number."""
_BODIES_IN_ALL = 16
"""Bodies of the largest size that may be in memory."""
_BODIES_OF_A_CLIENT = 8


class BodyBudget:
    """Counts the bytes of bodies that have arrived and are not yet decoded, of each client and of
    all.

    Args:
        max_body_bytes: of one body.
        sharing: with other processes of the server.
    """

    def __init__(self, max_body_bytes: int, sharing: Sharing = ALONE) -> None:
        self._sharing = sharing
        self._in_all = _BODIES_IN_ALL * max_body_bytes
        self._of_a_client = _BODIES_OF_A_CLIENT * max_body_bytes
        self._clients: dict[str, int] = {}
        self.num_bytes = 0

    def hold(self, client: str) -> HeldBody:
        """A context manager for a body that begins to arrive."""
        return HeldBody(self, client)

    def change(self, client: str, num_bytes: int) -> None:
        """Adds bytes, or removes them if `num_bytes` is negative. Raises OverloadedError."""
        of_client = self._clients.get(client, 0) + num_bytes
        in_all = self.num_bytes + num_bytes
        if num_bytes > 0:
            self._check(num_bytes, in_all, of_client, client)
        self.num_bytes = in_all
        self._sharing.bodies.set(in_all)
        self._sharing.clients.add(client, num_bytes)
        self._clients[client] = of_client
        if not of_client:
            del self._clients[client]

    def _check(self, num_bytes: int, in_all: int, of_client: int, client: str) -> None:
        in_all += self._sharing.bodies.elsewhere
        of_client += self._sharing.clients.elsewhere(client)
        if of_client > self._of_a_client or in_all > self._in_all:
            raise OverloadedError(
                f"{in_all - num_bytes} bytes of request bodies are being read,"
                f" {of_client - num_bytes} of them from this client; at most {self._in_all} and"
                f" {self._of_a_client} are taken: send it again in a moment"
            )


class HeldBody:
    """The counted bytes of one body, which the end of the block removes."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._size = 0
        self._counted = 0

    def grow(self, num_bytes: int) -> None:
        """Counts more bytes. Raises OverloadedError."""
        self._size += num_bytes
        more = self._size - _FREE_BYTES - self._counted
        if more > 0:
            self._budget.change(self._client, more)
            self._counted += more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._counted:
            self._budget.change(self._client, -self._counted)
            self._counted = 0
