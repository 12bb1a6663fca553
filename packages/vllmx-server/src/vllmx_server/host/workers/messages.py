"""Structs that the supervisor and its workers exchange."""

from __future__ import annotations

import msgspec
from vllmx_engine.wire.ipc import Start

from vllmx_server.config import ServerConfig
from vllmx_server.host.models.config import ModelConfig


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a worker to serve; it answers when it does."""

    server: ServerConfig
    core: Start
    core_paths: list[str]
    """The paths of the sockets of the core, or of all its replicas."""
    models: list[ModelConfig]
    """All models if they are several; `core` is that of the first."""
    row: int
    num_rows: int
    seed: int
    """The seed of the shared counts."""
    data_dir: str
    outlives: bool
    """The data folder outlives the server."""


class Reload(msgspec.Struct, frozen=True):
    """Tells a worker to read again what the supervisor could, which has logged the rest."""

    keys: bool
    certificate: bool


class Sleep(msgspec.Struct, frozen=True):
    """Asks the supervisor to put the first model to sleep."""

    level: int
    force: bool


class DrainReplica(msgspec.Struct, frozen=True):
    """Asks the supervisor, and by it all workers, to drain a replica."""

    number: int
    timeout_s: float


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request that another worker took."""

    method: str
    path: str
    query: bytes
    body: bytes
    owner: str
    """The API key's name; empty without keys."""
    address: str
    request_id: str


class RelayedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that was relayed."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    number: int
    """0: that is all; else the argument of `relay_more`."""


class RelayedMore(msgspec.Struct, frozen=True):
    """The next events of a stream."""

    body: bytes
    is_last: bool
