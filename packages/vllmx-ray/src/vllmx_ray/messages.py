"""Messages between the server, the driver on its host, actors and the hosts of cores: msgpack."""

from __future__ import annotations

import msgspec
from vllmx_core.config import EngineConfig
from vllmx_engine.wire.ipc import ErrorRecord


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The model that an actor runs."""

    config: EngineConfig
    key: bytes
    """The key of `vllmx_core.system.handshake`, which clients of the core need."""
    log_level: int


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the driver: the replicas, and the cluster for them."""

    address: str
    """The address of the cluster; auto: the one that runs on this host."""
    count: int
    num_cpus: int
    """Cores of a replica."""
    order: Order
    name: str
    """The name of the deployment, by which a second driver finds the actors of a first."""
    file: str
    """The path where the driver keeps the replicas' addresses, one a line; empty: nowhere now. The
    file of `vllmx_engine.replicas.remote.WANTED` next to it says which of them should run."""
    least: int
    """The number of those that run until that file is there."""
    tell_s: float = 30.0
    """Seconds between two warnings that the cluster has no room."""

    def order_of(self, row: int) -> Order:
        """The order of one replica."""
        return msgspec.structs.replace(self.order, config=self.order.config.of_replica(row))


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a replica, or of all of them together."""

    address: str = ""
    """host:port; empty: it does not listen yet."""
    is_ready: bool = False
    """True once the model is loaded."""
    error: ErrorRecord | None = None
    """The error of loading, after which nothing follows."""


order_decoder = msgspec.msgpack.Decoder(Order)
placement_decoder = msgspec.msgpack.Decoder(Placement)
report_decoder = msgspec.msgpack.Decoder(Report)
