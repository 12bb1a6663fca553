"""Moves blocks and states between the device and the tiers below it.

A block that is evicted is copied out before its next owner writes it. A new sequence whose prefix
goes on in the store waits for those blocks, outside of the queue, while others run. When it is
admitted, the blocks that lie in memory by then are copied in and filed in the prefix cache: from
there on they are a hit like any other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import numpy as np
from vllmx_core.backend import MovableCache

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.prefix_cache import PrefixCache
from vllmx_engine.core.prefix_reach import PrefixReach, Reach
from vllmx_engine.core.prefixes import Hit, Prefixes
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.state_slots import SlotPool, Snapshot
from vllmx_engine.core.tiers import STATES, BlockHead, Fetch, KeptBlock, Tiers, name_of, pieces

_MOST_FETCHED = 1 << 30
"""Bytes that are fetched at once for sequences that wait; others compute their prompts."""
_UNKNOWN_S = 10.0
"""Seconds that a fetch may take before the speed of prompts is known."""
_IDLE_WAIT_S = 0.01
"""Seconds for which a request that comes may wait while idle blocks are written."""
_LEAST_S = 0.05
"""Seconds that any fetch may take, however quickly its blocks could be computed."""
_LAND_SHARE = 1 / 8
"""The part of the time between two steps for which blocks of another replica are copied in."""
_LAND_BYTES, _LAND_BLOCKS = 1 << 20, 32
"""Bytes that are copied in before the time is looked at, and the least number of blocks: each time,
the whole prefix is looked up."""


class TieredPrefixes:
    """See the module's docstring.

    Args:
        slots: of a model with recurrent layers.
        clock: seconds, which never go back.
    """

    def __init__(
        self,
        tiers: Tiers,
        movable: MovableCache,
        prefixes: Prefixes,
        cache: PrefixCache,
        pool: BlockPool,
        slots: SlotPool | None,
        cost: StepCost,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self.num_landed_tokens = 0
        """Tokens of prompts whose blocks came from a lower tier."""
        self.num_given_up = self.num_peer_tokens = 0
        self.movable, self._prefixes, self._cache = movable, prefixes, cache
        self._pool, self._slots, self._cost = pool, slots, cost
        self._reach = PrefixReach(prefixes, cache, slots)
        kinds, one = (movable.blocks, movable.states), np.zeros(1, np.int32)
        self.block_bytes, self._slot_bytes = (
            0 if kind is None else kind.copy_out(one).result().shape[1] for kind in kinds
        )
        self._size = prefixes.block_size
        self._clock = clock
        self._waiting: dict[int, tuple[Sequence, Fetch, float]] = {}
        """Sequences that wait for a fetch, by its identity, with the time when it is given up."""
        self._landed_s = clock()
        """The time when blocks of other replicas were copied in last."""
        self._in_pieces = len(prefixes.full_groups) == prefixes.num_groups and slots is None
        """Any number of blocks is a prefix; with windows or states only that of a whole prompt."""
        self._unwritten: deque[List[int]] = deque()
        """Blocks for `write_idle`, in parts."""
        self._num_steps = 0
        """The core's steps when they were listed."""
        if tiers.keeps:
            pool.evicting = self._spill
            if slots is not None:
                slots.evicting = self._spill_states

    # --- from the device --------------------------------------------------------------------------
    def _spill(self, blocks: List[int]) -> None:
        """Copies cached blocks out, with the states behind them."""
        heads, rows, snapshots = list[BlockHead](), list[int](), list[Snapshot]()
        for block in blocks:
            entry = self._cache.entry(block)
            assert entry is not None, "an idle block is cached"
            digest, parent, content = entry
            name = name_of(digest, self._cache.group_of(block))
            if not self.tiers.knows(name):
                heads.append(BlockHead(name, parent, content))
                rows.append(block)
            snapshot = None if self._slots is None else self._slots.find(digest)
            if snapshot is not None:
                snapshots.append(snapshot)
        if rows:
            copy = self.movable.blocks.copy_out(np.array(rows, np.int32))
            self.tiers.put(heads, copy, len(rows) * self.block_bytes)
        self._spill_states(snapshots)

    def _spill_states(self, snapshots: List[Snapshot]) -> None:
        heads = dict[int, BlockHead]()
        for snapshot in snapshots:
            digest, parent, content = snapshot.entry
            name = name_of(digest, STATES)
            if not self.tiers.knows(name):
                heads[snapshot.slot] = BlockHead(name, parent, content)
        if heads and self.movable.states is not None:
            copy = self.movable.states.copy_out(np.array(list(heads), np.int32))
            self.tiers.put(list(heads.values()), copy, len(heads) * self._slot_bytes)

    def write_idle(self, num_steps: int) -> bool:
        """Writes some cached blocks to the store while nothing runs, so that a process that is
        killed loses few. Returns True if there were any.

        Args:
            num_steps: of the core so far; others may be cached since its last one.
        """
        if not self.tiers.has_store:
            return False
        if not self.tiers.wait(_IDLE_WAIT_S):
            return True
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._unwritten = deque(pieces(self._pool.idle_blocks()))
            self._spill_states([] if self._slots is None else self._slots.snapshots())
        if not self._unwritten:
            return False
        some = self._unwritten.popleft()
        self._spill([one for one in some if self._cache.entry(one) is not None])
        return True

    def close(self, timeout_s: float) -> None:
        """Writes all that no sequence owns to the store, what was used last first, as far as the
        time goes."""
        until_s = time.monotonic() + timeout_s
        if self.tiers.has_store:
            for some in pieces(self._pool.idle_blocks()):
                if time.monotonic() > until_s:
                    break
                self._spill(some)
                self.tiers.wait(max(0.0, until_s - time.monotonic()))
            self._spill_states([] if self._slots is None else self._slots.snapshots())
            self.tiers.wait(max(0.0, until_s - time.monotonic()))
        self.tiers.close(max(0.0, until_s - time.monotonic()))

    def counts(self) -> dict[str, Any]:
        """Fields of `CoreStats`."""
        in_host, host_bytes, in_store, store_bytes = self.tiers.counts
        remote = self.tiers.remote
        return {
            "num_host_blocks": in_host,
            "host_block_bytes": host_bytes,
            "num_stored_blocks": in_store,
            "stored_bytes": store_bytes,
            "tier_tokens": self.num_landed_tokens,
            "num_given_up_fetches": self.num_given_up,
            "num_store_failures": 0 if remote is None else remote.num_failures,
            "peer_tokens": self.num_peer_tokens,
            "num_peer_failures": self.tiers.num_peer_failures,
        }

    # --- to the device ----------------------------------------------------------------------------
    def start(self, sequence: Sequence) -> bool:
        """Begins to fetch the blocks behind a sequence's prefix that are in a store alone, or asks
        a shared store for them. False: there are none, or computing them is quicker."""
        if not self._prefixes.enabled:
            return False
        source = sequence.request.source if self.tiers.pull is not None else ""
        if not (source or self.tiers.keeps):
            return False
        hit = self._prefixes.look(sequence)
        if source:
            return self._fetch_from(sequence, hit)
        return self._ask(sequence, hit) or self._fetch(sequence, hit)

    def _fetch_from(self, sequence: Sequence, hit: Hit) -> bool:
        """Asks the replica that computes the prompt for what is missing here."""
        end, size = self._prefixes.num_findable(sequence), self._size
        if hit.num_blocks >= end or self._queued_bytes() > _MOST_FETCHED:
            return False
        firsts = dict(self._prefixes.first_needed(end)) if self._slots is None else {}
        # states may lie behind a shorter prefix
        names = self._reach.unknown(sequence, end, firsts, self.tiers.in_memory)
        if names:
            compute_s = self._compute_s((end - hit.num_blocks) * size, hit.num_blocks * size)
            request = sequence.request
            fetch = self.tiers.fetch_from(request.source, request.source_id, names)
            self._await(sequence, fetch, compute_s + 2 * request.source_s)
        return bool(names)

    def _queued_bytes(self) -> int:
        """The size of the blocks that sequences wait for."""
        fetches = (fetch for _, fetch, _ in self._waiting.values() if not fetch.looks)
        return sum(len(fetch.names) for fetch in fetches) * self.block_bytes

    def _ask(self, sequence: Sequence, hit: Hit) -> bool:
        """Asks the shared store for blocks that no other tier has."""
        remote, end = self.tiers.remote, self._prefixes.num_findable(sequence)
        if remote is None or not remote.is_usable or hit.num_blocks >= end:
            return False
        start = hit.num_blocks * self._size
        compute_s = self._compute_s(end * self._size - start, start)
        if remote.look_s > compute_s:
            return False
        names = self._reach.unknown(sequence, end, {}, self.tiers.has)
        if names:
            self._await(sequence, self.tiers.look(names), compute_s)
        return bool(names)

    def _compute_s(self, tokens: int, start: int) -> float:
        return self._cost.chunk_cost(tokens, start) if self._cost.knows_chunks else _UNKNOWN_S

    def _await(self, sequence: Sequence, fetch: Fetch, compute_s: float) -> None:
        until_s = self._clock() + max(compute_s, _LEAST_S)
        self._waiting[id(fetch)] = sequence, fetch, until_s
        sequence.fetch = fetch

    def _fetch(self, sequence: Sequence, hit: Hit) -> bool:
        reach = self._reach.longest(sequence, hit, self.tiers.has)
        if all(map(self.tiers.in_memory, reach.names)):
            return False
        num_bytes = len(reach.missing) * self.block_bytes + reach.lacks_states * self._slot_bytes
        start = hit.num_blocks * self._size
        tokens = reach.num_blocks * self._size - start
        compute_s = self._compute_s(tokens, start)
        ahead = self._queued_bytes()
        if ahead and ahead + num_bytes > _MOST_FETCHED:
            return False
        if self.tiers.read_seconds(ahead + num_bytes) > compute_s:
            return False
        self._await(sequence, self.tiers.fetch(reach.names), compute_s)
        return True

    def finished(self, wait_s: float = 0.0) -> list[Sequence]:
        """Sequences that wait no more: their blocks are there, or computing them would have been
        quicker. Waits for one."""
        found: list[Sequence] = []
        if not self._waiting:
            return found
        for fetch in self.tiers.fetched(wait_s):
            if fetch.source or id(fetch) not in self._waiting:
                continue
            sequence = self._waiting.pop(id(fetch))[0]
            again = fetch.looks and not sequence.finished
            if not again or not self._fetch(sequence, self._prefixes.look(sequence)):
                found.append(sequence)
        found += self._take_pulled(math.inf if wait_s else self._clock() - self._landed_s)
        now_s = self._clock()
        for key, (sequence, fetch, until_s) in list(self._waiting.items()):
            if now_s > until_s or sequence.finished:
                fetch.is_given_up = True
                self.num_given_up += not sequence.finished
                del self._waiting[key]
                found.append(sequence)
        return [sequence for sequence in found if not sequence.finished]

    def _take_pulled(self, passed_s: float) -> list[Sequence]:
        """Copies in what has come from other replicas, for a part of the time that has passed, so
        that decoding goes on at its pace. Returns sequences for which nothing more will come."""
        until_s = self._clock() + passed_s * _LAND_SHARE
        most, found = max(_LAND_BLOCKS, _LAND_BYTES // self.block_bytes), list[Sequence]()
        pulled = [entry[:2] for entry in self._waiting.values() if entry[1].source]
        for sequence, fetch in pulled:
            is_over, has_landed = fetch.is_over, self._in_pieces and not sequence.finished
            while has_landed and self._clock() < until_s:
                has_landed = self._land(sequence, self._prefixes.look(sequence), fetch, most)
            if is_over and not has_landed:
                del self._waiting[id(fetch)]
                found.append(sequence)
        self._landed_s = self._clock()
        return found

    def is_ready(self, sequence: Sequence) -> bool:
        """True if it waits neither for blocks nor for its grammar."""
        lacks_grammar = sequence.request.grammar is not None and sequence.grammar is None
        return not lacks_grammar and not self.is_fetching(sequence)

    def is_fetching(self, sequence: Sequence) -> bool:
        """True if blocks of its prefix are on their way."""
        return id(sequence.fetch) in self._waiting

    def land(self, sequence: Sequence, hit: Hit) -> bool:
        """Copies what lies in memory behind a sequence's hit into blocks of the device and files
        it, if there are blocks for all of it. True if the sequence has a longer hit now."""
        fetch, sequence.fetch = sequence.fetch, None
        return self._land(sequence, hit, fetch)

    def _land(
        self, sequence: Sequence, hit: Hit, fetch: Fetch | None, most: int | None = None
    ) -> bool:
        """See `land`; at most so many blocks of each group."""
        fetched = {} if fetch is None else fetch.blocks
        reach = self._reach.longest(
            sequence, hit, lambda name: name in fetched or self.tiers.in_memory(name), most
        )
        if reach.num_blocks <= hit.num_blocks:
            return False
        kept = self._checked(sequence, reach, fetched)
        if kept is None:
            return False
        present = self._reach.present(sequence, reach)
        there = np.array(list(present.values()), np.int32)
        if len(reach.missing) + self._pool.num_idle_of(there) > self._pool.num_available:
            return False
        self._pool.acquire(there)
        taken = self._pool.take(len(reach.missing))
        self._copy_in(taken, kept)
        blocks = present | dict(zip(reach.missing, taken, strict=True))
        self._file(sequence, reach, blocks)
        self._pool.release(np.array([blocks[place] for place in sorted(blocks)], np.int32))
        if reach.lacks_states:
            self._land_states(sequence, reach, kept[-1])
        tokens = (reach.num_blocks - hit.num_blocks) * self._size
        if sequence.request.source and fetched:
            self.num_peer_tokens += tokens
        else:
            self.num_landed_tokens += tokens
        return True

    def _copy_in(self, taken: list[int], kept: list[KeptBlock]) -> None:
        if taken:
            data = np.stack([block.data for block in kept[: len(taken)]])
            self.movable.blocks.copy_in(np.array(taken, np.int32), data)

    def _land_states(self, sequence: Sequence, reach: Reach, block: KeptBlock) -> None:
        """Copies states in, once their block is filed: a snapshot is forgotten with its block.
        Without a free slot the blocks wait for another snapshot."""
        assert self._slots is not None, "only slots lack states"
        assert self.movable.states is not None, "only slots lack states"
        slot = self._slots.take(any_snapshot=True)
        if slot < 0:
            return
        self.movable.states.copy_in(np.array([slot], np.int32), block.data[None])
        entry = sequence.entry_of(reach.num_blocks - 1, self._size)
        self._slots.file(slot, entry, is_far=True)
        self._slots.release(slot)

    def _file(self, sequence: Sequence, reach: Reach, blocks: dict[tuple[int, int], int]) -> None:
        groups = range(self._prefixes.num_groups)
        for index in sorted({index for index, _ in reach.missing}):
            digest, parent, content = sequence.entry_of(index, self._size)
            places = [blocks.get((index, group), -1) for group in groups]
            if self._cache.insert(places, digest, parent, content) is None:
                return  # the digest is that of other content: what follows would lack its parent

    def _checked(
        self, sequence: Sequence, reach: Reach, fetched: dict[bytes, KeptBlock]
    ) -> list[KeptBlock] | None:
        """The blocks of a reach, if all are there and what they must be."""
        indices = [index for index, _ in reach.missing]
        indices += [reach.num_blocks - 1] * reach.lacks_states
        kept: list[KeptBlock] = []
        for name, index in zip(reach.names, indices, strict=True):
            block = fetched.get(name) or self.tiers.get(name)
            _, parent, content = sequence.entry_of(index, self._size)
            size = self._slot_bytes if name[-1] == STATES else self.block_bytes
            if block is None or (block.parent, block.content) != (parent, content):
                return None
            if block.data.size != size:
                return None
            kept.append(block)
        return kept
