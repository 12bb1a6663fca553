"""A store of KV blocks for tests, which misbehaves as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any


class Panic(BaseException):
    """What a library of another language may raise."""


class FakeStore:
    """Servers that are given its `connect` share it. `fault`: lose, damage, swap, short, text,
    raise, panic or hang, where `only` names the method; empty: any but `secret`."""

    def __init__(self) -> None:
        self.spaces: dict[str, dict[bytes, bytes]] = {}
        self.fault = self.only = ""
        self.released = threading.Event()
        self.calls: list[str] = []

    def connect(self, namespace: str) -> FakeConnector:
        return FakeConnector(self, self.spaces.setdefault(namespace, {}))

    @property
    def num_blocks(self) -> int:
        return sum(len(name) == 17 for space in self.spaces.values() for name in space)


class FakeConnector:
    """A `KVConnector`."""

    def __init__(self, store: FakeStore, blocks: dict[bytes, bytes]) -> None:
        self._store, self._blocks = store, blocks

    def secret(self, made: bytes) -> bytes:
        self._fail("secret")
        return self._blocks.setdefault(b"secret", made)

    def has(self, names: Sequence[bytes]) -> Any:
        fault = self._fail("has")
        return 7 if fault == "short" else [name in self._blocks for name in names]

    def get(self, names: Sequence[bytes]) -> Any:
        fault = self._fail("get")
        found: list[Any] = [self._blocks.get(name) for name in names]
        if fault == "lose":
            return [None] * len(names)
        if fault == "damage":
            return [one and one[:-1] + bytes((one[-1] ^ 1,)) for one in found]
        if fault == "swap":
            others = [self._blocks[name] for name in self._blocks if len(name) == 17]
            return [next(one for one in others if one != right) for right in found]
        if fault == "text":
            return ["block"] * len(names)
        return found[:-1] if fault == "short" else found

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        self._fail("put")
        self._blocks.update(blocks)

    def clear(self) -> None:
        self._fail("clear")
        for name in [name for name in self._blocks if len(name) == 17]:
            del self._blocks[name]

    def close(self) -> None:
        self._store.calls.append("close")

    def _fail(self, method: str) -> str:
        store = self._store
        store.calls.append(method)
        if store.only != method and (store.only or method == "secret"):
            return ""
        if store.fault == "raise":
            raise ConnectionError("the store is gone")
        if store.fault == "panic":
            raise Panic("a panic")
        if store.fault == "hang":
            store.released.wait(60)
        return store.fault
