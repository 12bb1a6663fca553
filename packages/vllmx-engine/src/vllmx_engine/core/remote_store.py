"""KV blocks in a shared store, whose calls may fail, lie or never return (`--kv-connector`).

Each call runs on a daemon thread of its own and is waited for within bounds. After one that failed
the store rests: nothing is found or kept there until the pause is over and no call hangs any more.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any

from vllmx_core.kv_connector import CALL_S, KVConnector

from vllmx_engine.core.disk_store import sealed, unsealed

logger = logging.getLogger("vllmx.tiers")

KEY_BYTES = 32
_PAUSE_S = 30.0
"""Seconds of rest after a call that failed."""
_MOST_KNOWN = 1 << 17
"""Names that are remembered as being there."""
_CALL_BYTES = 4 << 20
"""Bytes that one call reads or writes: more would take too long on slow networks."""


class RemoteStore:
    """Seals what it keeps. The engine's thread asks what is known; the threads of the tiers call
    the rest.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(
        self,
        connector: KVConnector,
        call_s: float = CALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = b""
        """The secret of `open`."""
        self.num_failures = self.num_damaged = 0
        self.look_s = 0.0
        """Seconds that the last `look` took."""
        self._connector, self._call_s, self._clock = connector, call_s, clock
        self._lock = Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._hanging: list[Future[Any]] = []
        self._usable_at_s = -1.0
        self._block_bytes = _CALL_BYTES
        """The size of the blocks seen last."""

    def open(self) -> bool:
        """Gets the store's secret. False, with a line in the log: it cannot be used."""
        key = self._call(self._connector.secret, secrets.token_bytes(KEY_BYTES))
        if isinstance(key, bytes) and len(key) == KEY_BYTES:
            self.key = key
            return True
        logger.warning("--kv-connector: its store cannot be used: going on without it")
        return False

    @property
    def is_usable(self) -> bool:
        """False while it rests."""
        if self._hanging:
            with self._lock:
                self._hanging = [one for one in self._hanging if not one.done()]
        return not self._hanging and self._clock() >= self._usable_at_s

    def __contains__(self, name: bytes) -> bool:
        return name in self._known and self.is_usable

    @property
    def batch(self) -> int:
        """Blocks that one call reads or writes."""
        return max(1, _CALL_BYTES // self._block_bytes)

    def look(self, names: Sequence[bytes]) -> None:
        """Asks which of these there are."""
        begin_s = self._clock()
        found = self._call(self._connector.has, names)
        if self._is_for(found, names):
            self.look_s = self._clock() - begin_s
            self._learn(name for name, there in zip(names, found, strict=True) if there)

    def read(self, names: Sequence[bytes]) -> dict[bytes, memoryview]:
        """The blocks of one batch that are there and whole."""
        found = self._call(self._connector.get, names)
        blocks: dict[bytes, memoryview] = {}
        if not self._is_for(found, names):
            return blocks
        for name, data in zip(names, found, strict=True):
            block = unsealed(self.key, name, data) if isinstance(data, bytes) else None
            if block is not None:
                blocks[name] = block
                self._block_bytes = max(1, len(block))
                continue
            with self._lock:
                self._known.pop(name, None)
            if data is not None:
                if not self.num_damaged:
                    logger.warning("--kv-connector: a block is damaged: it is computed again")
                self.num_damaged += 1
        return blocks

    def write(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Keeps blocks of one batch, unless it rests."""
        packed = [(name, sealed(self.key, name, block)) for name, block in blocks]
        failures = self.num_failures
        if self.is_usable:
            self._call(self._connector.put, packed)
            if self.num_failures == failures:
                self._block_bytes = max(1, len(packed[0][1]))
                self._learn(name for name, _ in packed)

    def clear(self) -> None:
        """Has all blocks deleted, without waiting: until that is over the store rests."""
        with self._lock:
            self._known.clear()
            self._hanging.append(_started(self._connector.clear))

    def close(self) -> None:
        """Ends its connections, if they are quick to end."""
        self._call(self._connector.close)

    def _learn(self, names: Any) -> None:
        with self._lock:
            for name in names:
                self._known[name] = None
                self._known.move_to_end(name)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _is_for(self, found: Any, names: Sequence[bytes]) -> bool:
        if isinstance(found, list | tuple) and len(found) == len(names):
            return True
        if found is not None:
            self._rest(f"{type(found).__name__} in place of {len(names)} results")
        return False

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns its result; None, and the store rests, where it fails or takes too long."""
        if not self.is_usable:
            return None
        call = _started(function, *args)
        try:
            error = call.exception(self._call_s)
        except TimeoutError:
            with self._lock:
                self._hanging.append(call)
            self._rest(f"no answer in {self._call_s:g} s")
            return None
        if error is None:
            return call.result()
        self._rest(f"{type(error).__name__}: {error}")
        return None

    def _rest(self, reason: str) -> None:
        self._usable_at_s = self._clock() + _PAUSE_S
        self.num_failures += 1
        logger.warning("--kv-connector: %s: not used for %g s", reason, _PAUSE_S)


def _started(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls it on a thread that does not hold the process up at its end."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:  # of a plugin, such as a panic of Rust
            done.set_exception(error)

    Thread(target=run, daemon=True, name="vllmx-kv-connector").start()
    return done
