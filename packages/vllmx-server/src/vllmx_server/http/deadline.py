"""The deadline of a request, by which it must have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from vllmx_server.config import ServerConfig
from vllmx_server.errors import RequestTimeoutError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of one request.

    Args:
        limit_s: from its arrival to its end; 0: no limit.
        started_s: its arrival, in seconds of `time.monotonic`, the event loop's clock.
    """

    limit_s: float = 0.0
    started_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, at least 0; None: there is no limit."""
        if not self.limit_s:
            return None
        return max(0.0, self.started_s + self.limit_s - time.monotonic())

    async def bound(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`. When the time is up, cancels it and raises
        RequestTimeoutError."""
        try:
            async with asyncio.timeout(self.left_s) as timeout:
                return await work
        except TimeoutError:
            if timeout.expired():
                raise self.error() from None
            raise

    def error(self) -> RequestTimeoutError:
        """The error that the client gets."""
        return RequestTimeoutError(
            f"the request took longer than {self.limit_s:g} s, which is as long as"
            " --request-timeout-s lets it: ask for fewer tokens, or send it when less is going on"
        )


NEVER = Deadline()


def deadline_of(request: Request, config: ServerConfig) -> Deadline:
    """The deadline of a request, counted from its headers. The lines of a batch have none: they
    run in the capacity that others leave."""
    state = request.scope["state"]
    if not config.request_timeout_s or "is_batch" in state:
        return NEVER
    return Deadline(config.request_timeout_s, state.get("started_s", time.monotonic()))
