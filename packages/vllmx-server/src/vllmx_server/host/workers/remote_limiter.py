"""The rate limiter of the supervisor, as workers reach it."""

from __future__ import annotations

from vllmx_server.host.workers.channel import Channel
from vllmx_server.limits.rate_limiter import Granted, RateLimiter, Reservation, Used

RESERVE, SETTLE = "reserve", "settle"


class RemoteLimiter:
    """The limiter of another process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def reserve(self, reservation: Reservation) -> Granted:
        return await self._channel.ask(RESERVE, reservation, Granted)

    async def settle(self, used: Used) -> None:
        self._channel.tell(SETTLE, used)


class WorkerLimiter:
    """The supervisor's side for one worker. If the worker dies, its reservations are charged in
    full."""

    def __init__(self, limiter: RateLimiter, channel: Channel) -> None:
        self._limiter = limiter
        self._open: dict[int, int] = {}
        channel.serve(RESERVE, Reservation, self._reserve)
        channel.serve(SETTLE, Used, self._settle)

    async def close(self) -> None:
        """Charges what is still reserved: the worker is gone."""
        while self._open:
            ticket, num_tokens = self._open.popitem()
            await self._limiter.settle(Used(ticket=ticket, num_tokens=num_tokens))

    async def _reserve(self, reservation: Reservation) -> Granted:
        granted = await self._limiter.reserve(reservation)
        self._open[granted.ticket] = reservation.num_tokens
        return granted

    async def _settle(self, used: Used) -> None:
        if self._open.pop(used.ticket, None) is not None:
            await self._limiter.settle(used)
