"""The file of API keys and its entries, read and written.

The file has the SHA-256 of each key, never the key. Keys are 256 random bits, so a digest without
salt reveals nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from vllmx_core.errors import ConfigError, shown
from vllmx_core.system.files import replacing

from vllmx_server.limits.priorities import parse_range
from vllmx_server.schema.json_file import read_json_file

MAX_FILE_BYTES = 16 << 20
PREFIX = "vx-"
"""The prefix of generated keys, by which scanners of repositories recognise them."""
_Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. None: no limit."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
    """The name of its holder, who owns the data that are stored with it."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    admin: bool = False
    """May use the routes that change the server."""
    models: tuple[str, ...] | None = None
    """Served names that it may use, or aliases of them."""
    mcp_servers: tuple[str, ...] | None = None
    """Servers of --mcp-config whose tools it may use. None: all, unless another key of the file
    names any; none then."""
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrency: _Count | None = None
    """Requests at a time."""
    share: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """The share of the capacity relative to other keys that wait at the same priority."""
    priority_range: str | None = None
    """LEAST:GREATEST, as in --priority-range."""

    @property
    def has_limits(self) -> bool:
        """True if any limit is set."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrency)
        return any(limit is not None for limit in limits)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyRecord]


def read_keys(path: str | os.PathLike[str], flag: str = "--api-keys-file") -> tuple[KeyRecord, ...]:
    """The keys of a file. Raises ConfigError for a file that cannot be read, or has a wrong entry,
    or a name or key twice.

    Args:
        flag: that named the file, for messages.
    """
    where = f"{flag} {shown(str(path))}"
    found = read_json_file(path, where, MAX_FILE_BYTES, "make it with `vllmx keys add`")
    try:
        records = tuple(msgspec.convert(found, _File).keys)
    except msgspec.ValidationError as error:
        raise _wrong(where, f"is wrong: {error}") from error
    for field in ("name", "sha256"):
        values = set[str]()
        for value in (getattr(record, field) for record in records):
            if value in values:
                raise _wrong(where, f"has two entries of {field} {value!r}: keep one")
            values.add(value)
    for record in records:
        if record.priority_range is not None:
            parse_range(record.priority_range)
    return records


def write_keys(path: Path, records: tuple[KeyRecord, ...]) -> None:
    """Replaces the file atomically, also behind a link, readable by its owner alone. Raises
    ConfigError."""
    data = msgspec.json.format(msgspec.json.encode(_File(list(records))), indent=1)
    try:
        with replacing(path, private=True) as file:
            file.write(data + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error


def make_key() -> str:
    """A new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """The digest of a key, as it is in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where} {what}", param="api_keys_file")
