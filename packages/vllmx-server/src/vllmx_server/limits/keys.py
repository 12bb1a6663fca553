"""The API keys of a server and their holders."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllmx_core.errors import ConfigError, shown

from vllmx_server.errors import ForbiddenError
from vllmx_server.limits.key_records import KeyRecord, read_keys
from vllmx_server.limits.priorities import PriorityRange, client_name, parse_range

logger = logging.getLogger("vllmx.server")

MAX_LABELS = 100
OTHER = "other"
"""The label of keys without a name in the file, and of those after the first `MAX_LABELS`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key, who sent a request."""

    client: str
    """The name in fair share, salts, ranges and what is stored; "" without a key."""
    record: KeyRecord | None = None
    """The entry in the file of keys; None: a key of --api-key, or none."""
    mcp_servers: tuple[str, ...] | None = None
    """MCP servers whose tools it may use; None: all."""

    @property
    def name(self) -> str:
        """The name that operators know the holder by."""
        return self.client if self.record is None else self.record.name

    @property
    def share(self) -> float:
        """The part of the capacity that this client gets relative to others that wait."""
        return 1.0 if self.record is None else self.record.share

    def check_model(self, *names: str) -> None:
        """Raises ForbiddenError for a model that the key may not use, of which `names` are the own
        name and the aliases: the record may have any of them."""
        if self.record is None or self.record.models is None:
            return
        if not set(names).isdisjoint(self.record.models):
            return
        allowed = ", ".join(self.record.models) or "none"
        raise ForbiddenError(
            f"the key {self.name!r} may not use the model {names[0]}; it may use: {allowed}",
            param="model",
        )

    def check_mcp_server(self, server: str, param: str) -> None:
        """Raises ForbiddenError for an MCP server whose tools the key may not use, whether there
        is such a server or not."""
        if self.mcp_servers is None or server in self.mcp_servers:
            return
        allowed = ", ".join(self.mcp_servers) or "none"
        raise ForbiddenError(
            f"the key {self.name!r} may not use tools of the MCP server {shown(server)}; it may"
            f" use: {allowed}",
            param=param,
        )


@dataclass(slots=True)
class ApiKeys:
    """Keys of --api-key and of --api-keys-file. Raises ConfigError as `read_keys` does."""

    keys: Sequence[str] = ()
    path: str | None = None
    _holders: Mapping[bytes, Holder] = field(init=False)
    _clients: Mapping[str, Holder] = field(init=False)
    _labels: Mapping[str, str] = field(init=False)
    _unlisted: tuple[()] | None = field(init=False)
    """The MCP servers of keys that name none."""

    def __post_init__(self) -> None:
        self.reload()

    def reload(self) -> int:
        """Reads the file again and returns the number of keys. Raises ConfigError, and keeps the
        previous keys."""
        digests = [hashlib.sha256(key.encode()).digest() for key in self.keys]
        records = () if self.path is None else read_keys(self.path)
        self._unlisted = () if any(each.mcp_servers is not None for each in records) else None
        holders = {digest: self._nobody(client_name(digest)) for digest in digests}
        for record in records:
            servers = self._unlisted if record.mcp_servers is None else record.mcp_servers
            holders[bytes.fromhex(record.sha256)] = Holder(f"key-{record.name}", record, servers)
        named = [each for each in holders.values() if each.record is not None]
        self._labels = {each.client: each.name for each in named[:MAX_LABELS]}
        self._holders = holders
        self._clients = {holder.client: holder for holder in holders.values()}
        return len(holders)

    @property
    def is_open(self) -> bool:
        """Everybody may use the server without a key."""
        return self.path is None and not self.keys

    @property
    def has_several(self) -> bool:
        """True if there is more than one key."""
        return len(self._holders) > 1

    def find(self, digest: bytes) -> Holder | None:
        """The holder of the key with this SHA-256. The time of a look-up reveals nothing, since
        nobody can choose the digest of a guess."""
        return self._holders.get(digest)

    def holder(self, client: str) -> Holder:
        """The holder of a client's key; one without limits and rights if the key is unknown."""
        return self._clients.get(client) or self._nobody(client)

    def _nobody(self, client: str) -> Holder:
        return Holder(client, mcp_servers=self._unlisted)

    def label(self, client: str) -> str | None:
        """The label of a client in /metrics: its name in the file, for the first `MAX_LABELS`, or
        `OTHER`. None: there are no keys."""
        return None if self.is_open else self._labels.get(client, OTHER)

    def record_of(self, client: str) -> KeyRecord | None:
        """The entry of a client in the file."""
        return self.holder(client).record

    def priority_ranges(self) -> dict[str, PriorityRange]:
        """The ranges in the file, by client."""
        return {
            holder.client: parse_range(holder.record.priority_range)
            for holder in self._holders.values()
            if holder.record is not None and holder.record.priority_range is not None
        }


def reload_keys(keys: ApiKeys, level: int = logging.INFO) -> bool:
    """Reads the file of keys again and logs the number of keys at `level`. False: it cannot be
    used, and the keys stay as they are."""
    if keys.path is None:
        return True
    try:
        count = keys.reload()
    except ConfigError as error:
        logger.error("the keys stay as they are: %s", error.message)
        return False
    logger.log(level, "the keys were read again: %d", count)
    return True
