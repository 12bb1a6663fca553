"""What the workers of a server have counted, those that have ended among them.

A worker tells its counts once a second while they change, and whenever somebody asks for those of
the whole server, its own with the question. So whatever was shown once is known here, and no
counter falls when a worker dies.
"""

from __future__ import annotations

import asyncio

from vllmx_core.errors import VllmxError

from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.messages import COUNT, COUNTED, METRICS
from vllmx_server.watch.metrics import MetricCounts, Metrics

COUNT_S = 1.0
"""A worker that sends no counts for so long is counted by the last ones that it sent."""
ModelCounts = dict[str, MetricCounts]
"""The counts by model."""


class Counted:
    """The counts that the supervisor has received."""

    def __init__(self) -> None:
        self._known: dict[Channel, ModelCounts] = {}
        self._gone: dict[str, Metrics] = {}

    def serve(self, channel: Channel) -> None:
        """Takes the counts of a worker, and answers with those of all others."""

        async def counted(counts: ModelCounts) -> None:
            self._note(channel, counts)

        async def metrics(own: ModelCounts) -> list[ModelCounts]:
            self._note(channel, own)
            return await self.of_others(channel)

        self._known[channel] = {}
        channel.serve(COUNTED, ModelCounts, counted)
        channel.serve(METRICS, ModelCounts, metrics)

    def bury(self, channel: Channel) -> None:
        """Keeps the counts of a worker that has ended."""
        for model, counts in self._known.pop(channel, {}).items():
            gone = self._gone.setdefault(model, Metrics.elsewhere(model))
            gone.add(counts)
            gone.show(counts.core)

    async def of_others(self, requester: Channel) -> list[ModelCounts]:
        """The counts of all workers but the one that asks, as new as they can be had."""
        others = [channel for channel in self._known if channel is not requester]
        await asyncio.gather(*map(self._ask, others))
        found = [counts for channel, counts in self._known.items() if channel is not requester]
        return [*found, {model: gone.counts() for model, gone in self._gone.items()}]

    async def _ask(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(COUNT_S):
                self._note(channel, await channel.ask(COUNT, None, ModelCounts))
        except (TimeoutError, VllmxError):
            pass

    def _note(self, channel: Channel, counts: ModelCounts) -> None:
        if not channel.gone.is_set():  # else it is buried, or will be with what it told before
            self._known[channel] = counts
