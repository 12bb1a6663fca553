"""The desk at which a request asks whether its key may have so much, and says afterwards what it
took.

What is asked is plain data, so that a server with several processes has one desk: that of the
supervisor, which `RemoteDesk` asks. An admission that must be counted exactly belongs here; a limit
that a few more may exceed is cheaper as a gauge (`vllmx_server.sharing`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from vllmx_server.workers.channel import Channel

RESERVE, SETTLE = "reserve", "settle"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may come to at the most."""

    key: str
    """The API key's name; empty without keys."""
    model: str
    num_requests: int = 1
    num_tokens: int = 0
    """The tokens of prompts and answers together."""


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """It may go on."""

    ticket: int
    """The ticket for `settle`."""
    headers: dict[str, str] = {}
    """The headers of the answer, such as x-ratelimit-*."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to."""

    ticket: int
    num_tokens: int


class Desk(Protocol):
    """Reservations of one server."""

    async def reserve(self, wanted: Wanted) -> Granted:
        """Raises QueueFullError, with the time after which it may be tried again, and whatever else
        a key may not have."""
        ...

    async def settle(self, used: Used) -> None:
        """Gives back what was not used. Once for each ticket; unknown ones are ignored."""
        ...


class OpenDesk:
    """Grants everything."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)

    async def reserve(self, wanted: Wanted) -> Granted:
        return Granted(ticket=next(self._tickets))

    async def settle(self, used: Used) -> None: ...


class RemoteDesk:
    """The desk of another process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def reserve(self, wanted: Wanted) -> Granted:
        return await self._channel.ask(RESERVE, wanted, Granted)

    async def settle(self, used: Used) -> None:
        self._channel.tell(SETTLE, used)


class ServedDesk:
    """A desk as one worker reaches it: what that one has reserved is settled when it dies, as if
    all of it had been used."""

    def __init__(self, desk: Desk, channel: Channel) -> None:
        self._desk = desk
        self._open: dict[int, int] = {}
        channel.serve(RESERVE, Wanted, self._reserve)
        channel.serve(SETTLE, Used, self._settle)

    async def close(self) -> None:
        """The worker is gone."""
        while self._open:
            ticket, num_tokens = self._open.popitem()
            await self._desk.settle(Used(ticket=ticket, num_tokens=num_tokens))

    async def _reserve(self, wanted: Wanted) -> Granted:
        granted = await self._desk.reserve(wanted)
        self._open[granted.ticket] = wanted.num_tokens
        return granted

    async def _settle(self, used: Used) -> None:
        if self._open.pop(used.ticket, None) is not None:
            await self._desk.settle(used)
