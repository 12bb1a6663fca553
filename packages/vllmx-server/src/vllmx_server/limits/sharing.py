"""What a process counts of the limits of the whole server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllmx_engine.text.gauge import Alone, AloneByName, Gauge, NamedGauge


@dataclass(frozen=True, slots=True)
class Sharing:
    """A gauge for each limit. By default this process is the whole server."""

    connections: Gauge = field(default_factory=Alone)
    addresses: NamedGauge = field(default_factory=AloneByName)
    """Connections of each network address."""
    requests: Gauge = field(default_factory=Alone)
    """Generation requests in flight."""
    bodies: Gauge = field(default_factory=Alone)
    """Bytes of bodies that are being read."""
    clients: NamedGauge = field(default_factory=AloneByName)
    """Bytes of the bodies of each client that are being read."""
    texts: Gauge = field(default_factory=Alone)
    """Bytes of texts that wait for a thread."""
    sequences: Callable[[str], Gauge] = lambda model: Alone()
    """Sequences of a model in flight."""


ALONE = Sharing()
"""The sharing of a server that has no other process."""
