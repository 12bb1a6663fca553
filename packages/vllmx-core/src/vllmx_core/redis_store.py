"""KV blocks in a Redis server, or one that speaks its protocol (`--kv-connector redis:ADDRESS`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vllmx_core.errors import ConfigError
from vllmx_core.kv_connector import CALL_S

_LIFETIME_S = 7 * 24 * 3600
"""Seconds after which a block is deleted; those with a lifetime are what `volatile-lru` evicts."""
_SCANNED = 1000
"""Keys that are looked at, and deleted, at once."""


class RedisStore:
    """A `KVConnector`; its client may be used by several threads.

    Args:
        address: HOST, HOST:PORT or a URL such as rediss://user:password@host:6379/0.

    Raises ConfigError for a bad address, or without the package.
    """

    def __init__(self, address: str, namespace: str) -> None:
        try:
            redis: Any = import_module("redis")
        except ImportError as error:
            raise ConfigError(
                "--kv-connector redis needs a package: pip install 'vllmx[redis]'",
                param="kv_connector",
            ) from error
        url = address if "://" in address else f"redis://{address or 'localhost'}"
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=CALL_S, socket_connect_timeout=CALL_S
            )
        except ValueError as error:  # the address may hold a password: it is not repeated
            raise ConfigError(
                f"--kv-connector redis: {error}: give HOST:PORT or a URL such as"
                " redis://host:6379/0",
                param="kv_connector",
            ) from error
        self._prefix = f"vllmx:{namespace}:".encode()

    def secret(self, made: bytes) -> bytes:
        """See `KVConnector`; it has no lifetime."""
        name = self._prefix[:-1]
        self._client.set(name, made, nx=True)
        found: bytes = self._client.get(name)
        return found

    def has(self, names: Sequence[bytes]) -> Sequence[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(self._prefix + name)
        return [bool(count) for count in pipeline.execute()]

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        found: Sequence[bytes | None] = self._client.mget([self._prefix + name for name in names])
        return found

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, block in blocks:
            pipeline.set(self._prefix + name, block, ex=_LIFETIME_S)
        pipeline.execute()

    def clear(self) -> None:
        cursor = -1
        while cursor:
            cursor, keys = self._client.scan(max(0, cursor), self._prefix + b"*", _SCANNED)
            if keys:
                self._client.unlink(*keys)

    def close(self) -> None:
        self._client.close()
