"""The other processes of the server, which a worker reaches by way of the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.generating.served import ModelInfo, Served
from vllmx_server.host.models.host import Attachment
from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.dispatch import Mailbox
from vllmx_server.host.workers.messages import Begin, DrainReplica, Sleep
from vllmx_server.host.workers.relay import Relays, relay
from vllmx_server.host.workers.shared_counts import SharedCounts
from vllmx_server.limits.admission import Sharing
from vllmx_server.limits.rate_limiter import Granted, Reservation, Used
from vllmx_server.limits.usage import KeyUsage, UsageLedger
from vllmx_server.store.database import Storage
from vllmx_server.store.folder import Folder
from vllmx_server.watch.metrics import MetricCounts


class Peers:
    """The supervisor and the other workers.

    Attributes:
        channel: to the supervisor.
        sharing: gauges of limits.
        host: loads the cores of several models.
        leads: this process runs batches and background responses.
    """

    def __init__(self, channel: Channel, begin: Begin, descriptor: int) -> None:
        self.channel = channel
        self.leads = False
        self.host = RemoteHost(channel)
        self._begin = begin
        self._counts = counts = SharedCounts(descriptor, begin.num_rows, begin.row, begin.seed)
        self.sharing = Sharing(
            connections=counts.gauge("connections"),
            addresses=counts.named("addresses"),
            requests=counts.gauge("requests"),
            bodies=counts.gauge("body_bytes"),
            clients=counts.named("clients"),
            texts=counts.gauge("text_bytes"),
            sequences=counts.named("sequences").gauge,
        )

    def accepting(self, descriptor: int) -> socket.socket:
        """The socket that this worker accepts connections from."""
        return Mailbox(descriptor, self._counts.gauge("received"))

    def storage(self) -> Storage:
        """The storage of all workers, in a folder that the supervisor has locked."""
        begin = self._begin
        folder = Folder(begin.data_dir, outlives=begin.outlives, is_locked=True)
        return Storage(begin.data_dir, folder)

    def join(self, app: Starlette, served: Served) -> None:
        """Connects an application to the other processes."""
        served.limiter = RemoteLimiter(self.channel)
        served.usage = RemoteUsage(self.channel)
        Relays(app, app.router).serve(self.channel)

    async def relay(self, request: Request, body: bytes) -> Response:
        """The answer of the leader."""
        return await relay(self.channel, request, body)

    async def metric_counts(self, own: dict[str, MetricCounts]) -> list[dict[str, MetricCounts]]:
        """The counts of all other workers, by model. `own`: those of this one."""
        return await self.channel.ask("metrics", own, list[dict[str, MetricCounts]])

    async def sleep(self, level: int, *, force: bool) -> None:
        """See `AsyncLLM.sleep`."""
        await self.channel.ask("sleep", Sleep(level, force), type(None))

    async def wake(self) -> None:
        """See `AsyncLLM.wake`."""
        await self.channel.ask("wake", None, type(None))

    async def drain_replica(self, number: int, timeout_s: float) -> None:
        """See `AsyncLLM.drain_replica`."""
        await self.channel.ask("drain_replica", DrainReplica(number, timeout_s), type(None))

    async def add_replica(self, number: int) -> None:
        """See `AsyncLLM.add_replica`."""
        await self.channel.ask("add_replica", number, type(None))

    def shut_down(self) -> None:
        """Ends the whole server, as SIGTERM does."""
        self.channel.tell("shut_down", None)


class RemoteLimiter:
    """The supervisor's rate limiter, as a worker reaches it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def reserve(self, reservation: Reservation) -> Granted:
        return await self._channel.ask("reserve", reservation, Granted)

    async def settle(self, used: Used) -> None:
        self._channel.tell("settle", used)


class RemoteUsage(UsageLedger):
    """The supervisor's ledger, which gets the usage of each request as it ends."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def changed(self) -> None:
        new = self.take()
        if new:
            self._channel.tell("used", new)

    async def keep(self) -> None:
        self.changed()

    async def all(self) -> Mapping[str, KeyUsage]:
        self.changed()
        return await self._channel.ask("usage", None, dict[str, KeyUsage])


class RemoteHost:
    """The `registry.Host` of the supervisor."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def load(self, name: str) -> Attachment:
        return await self._channel.ask("load", name, Attachment)

    async def unload(self, name: str) -> None:
        await self._channel.ask("unload", name, type(None))

    async def cards(self) -> list[ModelInfo]:
        return await self._channel.ask("cards", None, list[ModelInfo])

    async def wake_idle(self) -> bool:
        return await self._channel.ask("wake_idle", None, bool)
