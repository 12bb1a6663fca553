"""What the supervisor and its workers ask of each other, each named by the constant before it."""

from __future__ import annotations

import msgspec
from vllmx_engine.wire.ipc import Start

from vllmx_server.config import ServerConfig
from vllmx_server.host.models.config import ModelConfig

# --- to a worker ----------------------------------------------------------------------------------
BEGIN = "begin"


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a worker to serve; it answers when it does."""

    server: ServerConfig
    core: Start
    """What the core loads."""
    door: str
    """The path of the core's socket."""
    models: list[ModelConfig]
    """All that are served, where they are several; `core` is the first one's."""
    row: int
    num_rows: int
    seed: int
    """The seed of the shared counts."""
    data_dir: str
    outlives: bool
    """The data folder outlives the server."""


LEAD = "lead"


class Lead(msgspec.Struct, frozen=True):
    """Take over batches and responses in the background: who had them is gone."""

    is_first: bool
    """Nobody had them since the server's start."""


END = "end"
"""Admit nothing new. Answered when nothing is in flight any more."""
STOP = "stop"
"""Close all connections and exit."""
RELOAD = "reload"
"""Read keys and certificates again."""
COUNT = "count"
"""Answered by MetricCounts, by model."""
LEAVE = "leave"
"""Let go of a model's core. Answered by False where requests need it."""
CORE_LOST = "core lost"
"""The core has ended: why, for people."""

# --- to the supervisor ----------------------------------------------------------------------------
COUNTED = "counted"
"""The MetricCounts of this worker, by model."""
METRICS = "metrics"
"""The same; answered by the MetricCounts of all other workers, those that have ended among them."""
USED = "used"
"""What keys have used, by client: a KeyUsage each, since the message before."""
USAGE = "usage"
"""Answered by the KeyUsage of each client since the first day."""
LOAD = "load"
"""A model by its name, loaded if it is not. Answered by the Attachment."""
UNLOAD = "unload"
"""Ends a model's core."""
CARDS = "cards"
"""Answered by a ModelCard for each model beside the default one."""
SLEEP, WAKE = "sleep", "wake"
"""End the first model's core, and start it again."""
WAKE_IDLE = "wake_idle"
"""Start it again where it was ended because nobody asked for it. Answered by whether it was."""
SHUT_DOWN = "shut down"
"""End the whole server, as SIGTERM does."""

# --- to the worker that leads, by way of the supervisor -------------------------------------------
RELAY = "relay"


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


class Reload(msgspec.Struct, frozen=True):
    """What the supervisor could read again, so that what is broken is told of once."""

    keys: bool
    certificate: bool


class RelayedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that was relayed."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    number: int
    """0: that is all; else what RELAY_MORE is asked with."""


RELAY_MORE = "relay more"


class RelayedMore(msgspec.Struct, frozen=True):
    """The next events of a stream."""

    body: bytes
    is_last: bool


RELAY_END = "relay end"
"""Nobody reads a stream any more."""
