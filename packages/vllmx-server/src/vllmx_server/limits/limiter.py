"""The desk at which a request asks whether its key may have so much, and says afterwards what it
took.

What is asked is plain data, so that a server with several processes has one desk: that of the
supervisor, which `RemoteDesk` asks. An admission that must be counted exactly belongs here; a limit
that a few more may exceed is cheaper as a gauge (`vllmx_server.limits.sharing`).
"""

from __future__ import annotations

import itertools
from typing import Protocol

import msgspec


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
