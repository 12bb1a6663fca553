"""The tiers below the device: blocks in the host's memory, then in a folder and a shared store.

The engine's thread hands copies in, asks what is known and takes what lies in memory. Two threads
work while steps run: one waits for copies and writes what memory has no room for, the other reads.
Blocks that another replica has are pulled on a thread for each request.
A block has a name: its digest and its cache group, or 255 for recurrent states.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Lock, Thread

import numpy as np
from vllmx_core.backend import CopyOut
from vllmx_core.errors import VllmxError
from vllmx_core.plan import U8
from vllmx_core.records import MutableRecord, Record, field

from vllmx_engine.core.disk_store import DiskStore, sealed, unsealed
from vllmx_engine.core.remote_store import RemoteStore

logger = logging.getLogger("vllmx.tiers")

STATES = 255
"""The group in names of recurrent states."""
_HEAD = Struct("<16sI")
_MOST_UNWRITTEN = 512 << 20
"""Bytes that wait to be written; beyond them blocks are dropped."""
_FIRST_RATE = 1e9
"""Bytes a second that reading is taken for before some were read."""
_RATE_WEIGHT = 0.2
_PULL_AGE_S = 60.0
_PIECE = 64
"""Blocks that are copied out at once when all are written."""


def name_of(digest: bytes, group: int) -> bytes:
    """The name of a group's block behind a digest."""
    return digest + bytes((group,))


class KeptBlock(Record, eq=False):
    """One block's bytes, and what they are of."""

    parent: bytes
    content: bytes
    data: U8

    def packed(self) -> bytes:
        return _HEAD.pack(self.parent, len(self.content)) + self.content + self.data.tobytes()

    @classmethod
    def unpacked(cls, block: memoryview) -> KeptBlock:
        """The reverse of `packed`."""
        parent, length = _HEAD.unpack(block[: _HEAD.size])
        end = _HEAD.size + length
        data = np.frombuffer(block, np.uint8, offset=end) if end < len(block) else np.zeros(0, "u1")
        return cls(parent, bytes(block[_HEAD.size : end]), data)


class BlockHead(Record):
    """A block that is to be kept, without its bytes."""

    name: bytes
    parent: bytes
    content: bytes


class Fetch(MutableRecord, eq=False):
    """Blocks that are read for somebody."""

    names: Sequence[bytes]
    blocks: dict[bytes, KeptBlock] = field(default_factory=dict)
    """Blocks that were read so far."""
    is_given_up: bool = False
    source: str = ""
    """The replica that is asked for them; empty: they are in tiers."""
    source_id: str = ""
    """The request that computes them there."""
    is_over: bool = False
    """No more blocks come from the replica."""
    looks: bool = False
    """It only asks the shared store which of the blocks it has; `blocks` stays empty."""


Pull = Callable[[Fetch], Iterable[dict[bytes, KeptBlock]]]
"""Yields the blocks of a fetch from another replica as they come. Raises OSError, ValueError and
VllmxError if it cannot be reached, or has another model or other options."""


class Tiers:
    """See the module's docstring.

    Args:
        store: the folder, if there is one.
        host_bytes: of blocks in memory, not counting those that wait to be written.
        remote: a shared store, which has copies of what leaves the memory.
    """

    def __init__(
        self, store: DiskStore | None, host_bytes: int, remote: RemoteStore | None = None
    ) -> None:
        self._store, self._host_bytes, self.remote = store, host_bytes, remote
        self._lock = Lock()
        self._memory: OrderedDict[bytes, KeptBlock] = OrderedDict()
        """The least recently used first."""
        self._memory_bytes = 0
        self._pending: set[bytes] = set()
        """Blocks whose copies are under way."""
        self._unwritten = 0
        self._writer = ThreadPoolExecutor(1, "vllmx-kv-out")
        self._reader = ThreadPoolExecutor(1, "vllmx-kv-in")
        self._copies: set[Future[None]] = set()
        self._done: SimpleQueue[Fetch] = SimpleQueue()
        self._rate = 0.0
        """Bytes that were read in a second; 0 before some were."""
        self.num_damaged = self.num_peer_failures = 0
        self.pull: Pull | None = None
        """Set where other replicas may be asked for blocks."""
        self._pull_byte_s = self._pulled_s = 0.0
        """Seconds for a byte of such blocks, and the time when it was measured."""

    # --- the engine's thread ----------------------------------------------------------------------
    @property
    def has_store(self) -> bool:
        """True if blocks outlive the process."""
        return self._store is not None or self.remote is not None

    @property
    def keeps(self) -> bool:
        """True if blocks that leave the device are kept."""
        return self._host_bytes > 0 or self.has_store

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Blocks in memory, their bytes, blocks in the store and its bytes."""
        store = self._store
        stored = (0, 0) if store is None else (store.num_blocks, store.num_bytes)
        return len(self._memory), self._memory_bytes, *stored

    def knows(self, name: bytes) -> bool:
        """True if a block need not be copied out again."""
        return name in self._pending or self.has(name)

    def has(self, name: bytes) -> bool:
        """True if a block is in memory or in a store, as far as is known of a shared one."""
        stores = self._store, self.remote
        return name in self._memory or any(one is not None and name in one for one in stores)

    def in_memory(self, name: bytes) -> bool:
        """True if `get` has it."""
        return name in self._memory

    def get(self, name: bytes) -> KeptBlock | None:
        """A block that lies in memory."""
        with self._lock:
            block = self._memory.get(name)
            if block is not None:
                self._memory.move_to_end(name)
            return block

    def put(self, heads: Sequence[BlockHead], copy: CopyOut, num_bytes: int) -> None:
        """Keeps blocks whose copy is under way, as far as the writer keeps up.

        Args:
            num_bytes: of all of them.
        """
        with self._lock:
            if self._unwritten and self._unwritten + num_bytes > _MOST_UNWRITTEN:
                return
            self._unwritten += num_bytes
            self._pending.update(head.name for head in heads)
        self._copies = {one for one in self._copies if not one.done()}
        self._copies.add(self._writer.submit(self._take_in, heads, copy, num_bytes))

    def fetch(self, names: Sequence[bytes]) -> Fetch:
        """Reads blocks in this order, up to the first that cannot be had; `fetched` will name it.
        The writer keeps those that lie in memory meanwhile."""
        fetch = Fetch(names)
        self._reader.submit(self._read_all, fetch)
        return fetch

    def look(self, names: Sequence[bytes]) -> Fetch:
        """Asks the shared store which of these it has; `fetched` will name it."""
        fetch = Fetch(names, looks=True)
        self._reader.submit(self._read_all, fetch)
        return fetch

    def fetch_from(self, source: str, source_id: str, names: Sequence[bytes]) -> Fetch:
        """Asks another replica for blocks; `fetched` names it whenever some have come. `pull` must
        be set."""
        fetch = Fetch(names, source=source, source_id=source_id)
        Thread(target=self._pull, args=(fetch,), daemon=True, name="vllmx-kv-pull").start()
        return fetch

    def was_pulled(self, num_bytes: int, seconds: float) -> None:
        """Notes how long blocks took to come from another replica."""
        weight = _RATE_WEIGHT if self.pull_byte_s else 1.0
        self._pull_byte_s += weight * (seconds / num_bytes - self._pull_byte_s)
        self._pulled_s = time.monotonic()

    @property
    def pull_byte_s(self) -> float:
        """Seconds for a byte from another replica; 0: not measured of late. A slow network may be
        faster later, and without a try nobody would know."""
        return self._pull_byte_s if time.monotonic() - self._pulled_s < _PULL_AGE_S else 0.0

    def fetched(self, wait_s: float) -> list[Fetch]:
        """Fetches that are over, or have new blocks from a replica. Waits for one."""
        found: list[Fetch] = []
        try:
            while True:
                found.append(self._done.get(wait_s > 0 and not found, wait_s or None))
        except Empty:
            return found

    def read_seconds(self, num_bytes: int) -> float:
        """The predicted time of a fetch."""
        return num_bytes / (self._rate or _FIRST_RATE)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all copies so far are in their tier; False where that takes longer."""
        return not wait(self._copies, timeout_s).not_done

    def clear(self) -> None:
        """Forgets all blocks."""
        if self.remote is not None:
            self.remote.clear()  # it rests, so that nothing waits to be put there
        self.wait()
        with self._lock:
            self._memory.clear()
            self._memory_bytes = 0
        for store in (self._store, self.remote):
            if store is not None:
                store.clear()

    def close(self, timeout_s: float) -> None:
        """Writes what lies in memory to the store, as far as the time goes, and ends the
        threads."""
        if self.has_store:
            until_s = time.monotonic() + timeout_s
            last = self._writer.submit(self._shrink, 0, until_s)
            wait([last], timeout_s)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        for store in (self._store, self.remote):
            if store is not None:
                store.close()

    # --- the writer -------------------------------------------------------------------------------
    def _take_in(self, heads: Sequence[BlockHead], copy: CopyOut, num_bytes: int) -> None:
        try:
            rows = copy.result()
            with self._lock:
                for head, row in zip(heads, rows, strict=True):
                    if head.name not in self._memory:
                        data = row.copy() if len(rows) > 1 else row  # which would keep all others
                        self._memory[head.name] = KeptBlock(head.parent, head.content, data)
                        self._memory_bytes += data.nbytes
            self._shrink(self._host_bytes)
        except Exception:  # the blocks are lost, and nobody waits for them
            logger.exception("KV blocks could not be kept")
        finally:
            with self._lock:
                self._unwritten -= num_bytes
                self._pending.difference_update(head.name for head in heads)

    def _shrink(self, host_bytes: int, until_s: float = float("inf")) -> None:
        """Moves the blocks that were not used for the longest time to the stores."""
        while time.monotonic() <= until_s:
            batch = 1 if self.remote is None else self.remote.batch
            with self._lock:
                over = self._memory_bytes - host_bytes
                some: list[tuple[bytes, KeptBlock]] = []
                for name, block in self._memory.items():
                    if len(some) == batch or (host_bytes and over <= 0):
                        break
                    some.append((name, block))
                    over -= block.data.nbytes
            if not some:
                return
            self._store_all(some)
            with self._lock:
                for name, block in some:
                    if self._memory.pop(name, None) is not None:
                        self._memory_bytes -= block.data.nbytes

    def _store_all(self, blocks: Sequence[tuple[bytes, KeptBlock]]) -> None:
        if self._store is not None:
            for name, block in blocks:
                if name not in self._store:
                    self._store.write(name, sealed(self._store.key, name, block.packed()))
        if self.remote is not None and self.remote.is_usable:
            absent = [(name, block.packed()) for name, block in blocks if name not in self.remote]
            if absent:
                self.remote.write(absent)

    # --- the readers ------------------------------------------------------------------------------
    def _pull(self, fetch: Fetch) -> None:
        assert self.pull is not None, "replicas are known"
        try:
            for blocks in self.pull(fetch):
                fetch.blocks.update(blocks)
                self._done.put(fetch)
        except (OSError, ValueError, VllmxError) as error:  # what is missing is computed
            self.num_peer_failures += 1
            logger.warning("no more KV blocks from the replica at %s: %s", fetch.source, error)
        finally:
            fetch.is_over = True
            self._done.put(fetch)

    def _read_all(self, fetch: Fetch) -> None:
        ahead: dict[bytes, memoryview] = {}
        try:
            if fetch.looks and self.remote is not None:
                self.remote.look(fetch.names)
                return
            for index, name in enumerate(fetch.names):
                if fetch.is_given_up:
                    break
                block = self.get(name) or self._read(name)
                if block is None and self.remote is not None:
                    if name not in ahead and name in self.remote:
                        ahead = self._read_ahead(self.remote, fetch.names[index:])
                    if name in ahead:
                        block = KeptBlock.unpacked(ahead[name])
                if block is None:
                    break
                fetch.blocks[name] = block
        except Exception:  # what is missing is computed
            logger.exception("KV blocks could not be read")
        finally:
            self._done.put(fetch)

    def _read(self, name: bytes) -> KeptBlock | None:
        store = self._store
        if store is None:
            return None
        begin_s = time.perf_counter()
        data = store.read(name)
        if data is None:
            return None
        block = unsealed(store.key, name, data)
        if block is None:
            store.forget(name)
            if not self.num_damaged:
                logger.warning("a KV block of the store is damaged: it is computed again")
            self.num_damaged += 1
            return None
        self._was_read(len(data), time.perf_counter() - begin_s)
        return KeptBlock.unpacked(block)

    def _read_ahead(self, remote: RemoteStore, names: Sequence[bytes]) -> dict[bytes, memoryview]:
        """Reads the first of these blocks, and with it the next ones that it has."""
        begin_s = time.perf_counter()
        known = (name for name in names if name in remote and name not in self._memory)
        blocks = remote.read(list(islice(known, remote.batch)))
        self._was_read(sum(map(len, blocks.values())), time.perf_counter() - begin_s)
        return blocks

    def _was_read(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / max(1e-9, seconds)
        self._rate += (rate - self._rate) * (_RATE_WEIGHT if self._rate else 1.0)


def pieces(blocks: Sequence[int]) -> Iterable[Sequence[int]]:
    """Blocks in parts that fit into memory together."""
    return (blocks[begin : begin + _PIECE] for begin in range(0, len(blocks), _PIECE))
