"""The rate limiter of the supervisor, as workers reach it."""

from __future__ import annotations

from vllmx_server.host.workers.channel import Channel
from vllmx_server.limits.limiter import Desk, Granted, Used, Wanted

RESERVE, SETTLE = "reserve", "settle"


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
