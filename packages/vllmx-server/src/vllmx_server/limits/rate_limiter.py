"""Rate limiter: requests and tokens a minute, and requests at a time, for each key.

The most that a request may use is reserved when it is admitted, and settled at its end, so a key is
never refused for tokens that its other requests did not use. Reservations are plain data: a server
with several processes has one limiter, in the supervisor, and workers reach it by `RemoteLimiter`.
Limits that must be exact belong here; a limit that a few requests may exceed is cheaper as a shared
count (`vllmx_server.limits.admission`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from vllmx_server.errors import RateLimitError
from vllmx_server.limits.key_records import KeyRecord
from vllmx_server.limits.keys import ApiKeys


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
        """Raises RateLimitError with the time to wait."""
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


_MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A budget of so many in a minute: it fills steadily, and holds no more than a minute's
    worth."""

    size: float
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        passed = max(0.0, now_s - self.filled_s)  # clocks may go back
        self.level = min(self.size, self.level + passed * self.size / _MINUTE_S)
        self.filled_s = max(self.filled_s, now_s)

    def wait_s(self, amount: float) -> float:
        """The seconds until so much is there; 0: now."""
        return max(0.0, (amount - self.level) * _MINUTE_S / self.size)


@dataclass(slots=True)
class _Use:
    """The running requests of a key, and what is left of its limits."""

    requests: Bucket | None
    tokens: Bucket | None
    concurrency: int | None
    running: int = 0


@dataclass(frozen=True, slots=True)
class _Ticket:
    use: _Use
    num_requests: int
    reserved: float


@dataclass(slots=True)
class KeyLimiter:
    """A `RateLimiter` over the limits in a file of keys."""

    keys: ApiKeys
    clock: Callable[[], float] = time.monotonic
    _uses: dict[str, _Use] = field(default_factory=dict)
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def reserve(self, reservation: Reservation) -> Granted:
        """Raises RateLimitError. A request for more than a minute's tokens is admitted when a
        minute's are left."""
        record = self.keys.record_of(reservation.key)
        number = next(self._numbers)
        if record is None or not record.has_limits:
            return Granted(ticket=number)
        use = self._use(reservation.key, record)
        if use.concurrency is not None and use.running + reservation.num_requests > use.concurrency:
            raise _refusal(use, f"{use.concurrency} requests at a time", 1.0)
        tokens = 0.0
        for bucket, what, amount in (
            (use.requests, "requests", reservation.num_requests),
            (use.tokens, "tokens", reservation.num_tokens),
        ):
            if bucket is not None and bucket.wait_s(min(amount, bucket.size)):
                wait_s = bucket.wait_s(min(amount, bucket.size))
                raise _refusal(use, f"{bucket.size:.0f} {what} a minute", wait_s)
        use.running += reservation.num_requests
        if use.requests is not None:
            use.requests.level -= min(reservation.num_requests, use.requests.size)
        if use.tokens is not None:
            tokens = min(reservation.num_tokens, use.tokens.size)
            use.tokens.level -= tokens
        self._tickets[number] = _Ticket(use, reservation.num_requests, tokens)
        return Granted(ticket=number, headers=_headers(use))

    async def settle(self, used: Used) -> None:
        """See `RateLimiter.settle`. Tokens beyond the reservation are owed."""
        ticket = self._tickets.pop(used.ticket, None)
        if ticket is None:
            return
        ticket.use.running -= ticket.num_requests
        bucket = ticket.use.tokens
        if bucket is not None:
            bucket.level = min(bucket.size, bucket.level + ticket.reserved - used.num_tokens)

    def _use(self, key: str, record: KeyRecord) -> _Use:
        """The use of a key, with its limits as they are now and its buckets filled up to now."""
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = _Use(None, None, None)
        now_s = self.clock()
        use.requests = _sized(use.requests, record.requests_per_minute, now_s)
        use.tokens = _sized(use.tokens, record.tokens_per_minute, now_s)
        use.concurrency = record.concurrency
        return use


def _headers(use: _Use) -> dict[str, str]:
    """The headers of limits, as OpenAI's API has them."""
    found = {}
    for name, bucket in (("requests", use.requests), ("tokens", use.tokens)):
        if bucket is not None:
            found[f"x-ratelimit-limit-{name}"] = f"{bucket.size:.0f}"
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.size):.3f}s"
    return found


def _sized(bucket: Bucket | None, size: int | None, now_s: float) -> Bucket | None:
    """A bucket of that size, which may have changed since the file was read."""
    if size is None:
        return None
    if bucket is None:
        return Bucket(size, size, now_s)
    bucket.fill(now_s)
    if bucket.size != size:
        bucket.level, bucket.size = bucket.level * size / bucket.size, size
    return bucket


def _refusal(use: _Use, limit: str, wait_s: float) -> RateLimitError:
    error = RateLimitError(
        f"this key may use {limit} and has: send it again in {math.ceil(wait_s)} s"
    )
    error.retry_after_s, error.headers = wait_s, _headers(use)
    return error
