"""Rate limiter: reserves tokens for a key before a request, and settles actual use after it.

Reservations are plain data: a server with several processes has one limiter, in the supervisor,
and workers reach it by `RemoteLimiter`. Limits that must be exact belong here; a limit that a few
requests may exceed is cheaper as a shared count (`vllmx_server.limits.sharing`).
"""

from __future__ import annotations

import itertools
from typing import Protocol

import msgspec


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a request may use."""

    key: str
    """The API key's name; empty without keys."""
    model: str
    num_requests: int = 1
    num_tokens: int = 0
    """The tokens of prompts and answers together."""


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """The request may go on."""

    ticket: int
    """The ticket for `settle`."""
    headers: dict[str, str] = {}
    """The headers of the answer, such as x-ratelimit-*."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a request has used."""

    ticket: int
    num_tokens: int


class RateLimiter(Protocol):
    """The reservations of one server."""

    async def reserve(self, reservation: Reservation) -> Granted:
        """Raises QueueFullError with the time to wait, and ForbiddenError for what the key may not
        use."""
        ...

    async def settle(self, used: Used) -> None:
        """Returns the unused part. Call once for each ticket; unknown tickets are ignored."""
        ...


class Unlimited:
    """Grants everything."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)

    async def reserve(self, reservation: Reservation) -> Granted:
        return Granted(ticket=next(self._tickets))

    async def settle(self, used: Used) -> None: ...
