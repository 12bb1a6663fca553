"""The protocol of shared stores of KV blocks (`--kv-connector`).

A plugin names a callable `(address: str, namespace: str) -> KVConnector` in a `KVConnectorSpec`.
The engine calls it and its methods on threads of its own, two at once at most, and waits for no
call longer than `CALL_S`: after one that raised, hung or returned something else, the store rests
for half a minute. Blocks carry a keyed checksum and what they are of, so that wrong bytes are a
miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CALL_S = 2.0
"""Seconds that a call may take."""


class KVConnector(Protocol):
    """A store of blocks by name. Blocks of one namespace are of one model, dtype, backend and
    version; another namespace's are never touched. A block may be lost at any time."""

    def secret(self, made: bytes) -> bytes:
        """Keeps `made` (32 bytes) as the namespace's secret unless it has one; returns the one that
        it has. Names and checksums are made with it, so all servers must get the same."""

    def has(self, names: Sequence[bytes]) -> Sequence[bool]:
        """Says of each name (17 bytes) whether there is a block."""

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        """Returns the block of each name; None: there is none."""

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Keeps blocks (name, bytes), in place of those that have these names."""

    def clear(self) -> None:
        """Deletes all blocks of the namespace."""

    def close(self) -> None:
        """Ends connections."""
