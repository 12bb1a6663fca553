"""An admitted request until its end: the usage of its key is reserved and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.requests import Request

from vllmx_server.errors import RateLimitError
from vllmx_server.limits.keys import Holder
from vllmx_server.limits.rate_limiter import RateLimiter, Reservation, Used
from vllmx_server.limits.usage import KeyUsage

RESERVED_OUTPUT = 2048
"""The most tokens that are reserved for an answer: most requests have a max_tokens that they never
use."""
USUAL_OUTPUT = 512
"""Tokens that are reserved for an answer if the request has no limit."""
BYTES_OF_TOKEN = 4
"""Bytes of a body that count as a token; a guess that the end of the answer corrects."""
HEADERS = "limit_headers"
"""The key in a request's state of the headers that show its API key's limits."""


class Counted(Protocol):
    """Tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Admitted:
    """Called once, at the end. `usage` is set when there are tokens; `num_tokens` are those that no
    model read, which count against limits only."""

    leave: Callable[[], None]
    count: Callable[[KeyUsage], None]
    settle: Callable[[Used], None] | None = None
    """Settles the reservation; None: there is none."""
    ticket: int = 0
    usage: Counted | None = None
    num_tokens: int = 0

    def __call__(self) -> None:
        self.leave()
        new, usage = KeyUsage(requests=1), self.usage
        num_tokens = self.num_tokens
        if usage is not None:
            num_tokens += usage.prompt_tokens + usage.completion_tokens
            new.prompt_tokens = usage.prompt_tokens
            new.cached_tokens = usage.cached_tokens
            new.completion_tokens = usage.completion_tokens
        self.count(new)
        if self.settle is not None:
            self.settle(Used(ticket=self.ticket, num_tokens=num_tokens))


class Settlements:
    """Settlements on their way to a limiter."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def settle(self, limiter: RateLimiter, used: Used) -> None:
        """Begins a settlement without waiting for it."""
        task = asyncio.ensure_future(limiter.settle(used))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def expected_tokens(num_bytes: int, body: object) -> int:
    """The tokens of prompt and answers to expect of a request with a body of so many bytes."""
    named = (getattr(body, name, None) for name in _LIMITS)
    most = next((value for value in named if isinstance(value, int)), USUAL_OUTPUT)
    answers = getattr(body, "n", None) or 1
    return num_bytes // BYTES_OF_TOKEN + answers * min(most, RESERVED_OUTPUT)


async def admitted(
    request: Request,
    holder: Holder,
    names: Sequence[str],
    num_tokens: int,
    leave: Callable[[], None],
    limiter: RateLimiter,
    settlements: Settlements,
    count: Callable[[KeyUsage], None],
) -> Admitted:
    """Lets a request in that `leave` ends, for a model of these names, its own first. The lines of
    a batch are not counted against limits: they run in what others leave. Raises ForbiddenError for
    a model that the key may not use and RateLimitError where it has used up what it may; `leave`
    was called then."""
    try:
        holder.check_model(*names)
        is_batch = "is_batch" in request.scope["state"]
        if is_batch or holder.record is None or not holder.record.has_limits:
            return Admitted(leave, count)
        reservation = Reservation(key=holder.client, model=names[0], num_tokens=num_tokens)
        granted = await limiter.reserve(reservation)
    except BaseException as error:
        leave()
        if isinstance(error, RateLimitError):
            count(KeyUsage(refused=1))
            request.scope["state"][HEADERS] = error.headers or {}
        raise
    request.scope["state"][HEADERS] = granted.headers
    return Admitted(leave, count, partial(settlements.settle, limiter), granted.ticket)
