"""Takes a sequence's first blocks from the prefix cache, and files its full blocks there."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence as List

import numpy as np
from vllmx_core.plan import I32
from vllmx_core.records import Record

from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.prefix_cache import PrefixCache, Run
from vllmx_engine.core.prompt_scores import PromptScores
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Found, Sequence
from vllmx_engine.core.state_slots import SlotPool, Snapshot


class Hit(Record):
    """The longest prefix of a sequence that need not be computed."""

    num_blocks: int
    """It ends with this block of the sequence."""
    blocks: tuple[I32, ...]
    """The last blocks in each cache group: all of them, or those that a window still covers."""
    snapshot: Snapshot | None = None
    """The snapshot of the states behind it, where the model has recurrent layers."""
    num_found: int = 0
    """The number of blocks that the hit of such a model would have had with states behind each of
    them."""

    @property
    def all_blocks(self) -> I32:
        """(blocks,) of all groups."""
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)


class Prefixes:
    """The look-up of prefixes, between the sequences and the cache. With `enabled` False nothing is
    found; the caller that admits a row then ensures that nothing is filed either
    (`RowTable.skip_caching`)."""

    def __init__(
        self,
        table: RowTable,
        pool: BlockPool,
        cache: PrefixCache,
        slots: SlotPool | None = None,
        *,
        enabled: bool,
    ) -> None:
        """`slots`: of a model with recurrent layers."""
        self.enabled = enabled
        self.run_blocks = 64
        """The blocks of a run, which begins at a multiple of as many."""
        self._table = table
        self._size = self.block_size = table.block_size
        self.num_groups = len(table.windows)
        self._pool = pool
        self._cache = cache
        self.scores = PromptScores(cache, table.block_size)
        self._slots = slots
        self._full = self.full_groups = [
            group for group, window in enumerate(table.windows) if window is None
        ]
        self._windows = [
            (group, window) for group, window in enumerate(table.windows) if window is not None
        ]
        self._miss = Hit(0, (np.zeros(0, np.int32),) * len(table.windows))

    def look(self, sequence: Sequence) -> Hit:
        """Finds the longest cached prefix of a sequence: that of which groups without a window have
        all blocks, and those with one the blocks that the next token sees, and with recurrent
        layers there is a snapshot behind it. The last known token is always computed, because its
        logits are needed; so are tokens whose log-probabilities are wanted and not known."""
        if not self.enabled:
            return self._miss
        length = self._full_prefix(sequence)
        if not length or not (length := self._window_prefix(sequence, length)):
            return self._miss
        if self._slots is not None:
            return self._state_hit(sequence, length)
        return Hit(length, self._hit_blocks(sequence, length))

    def _state_hit(self, sequence: Sequence, num_found: int) -> Hit:
        """The longest of the prefixes up to this one that has states behind it. A window that
        covers the longest may lack blocks of a shorter one."""
        length = num_found
        while length:
            snapshot = self._snapshot(sequence, length)
            if snapshot is None:
                length -= 1
            elif (covered := self._window_prefix(sequence, length)) < length:
                length = covered
            else:
                return Hit(length, self._hit_blocks(sequence, length), snapshot, num_found)
        return Hit(0, self._miss.blocks, num_found=num_found)

    def _snapshot(self, sequence: Sequence, length: int) -> Snapshot | None:
        assert self._slots is not None
        snapshot = self._slots.find(sequence.digests[length - 1])
        if snapshot is None or snapshot.entry != sequence.entry_of(length - 1, self._size):
            return None
        return snapshot

    def num_findable(self, sequence: Sequence) -> int:
        """Blocks of a sequence that may come from the cache at all."""
        most = (len(sequence.tokens) - 1) // self._size
        if sequence.all_scored:
            return most
        index = sequence.num_scored // self._size
        if sequence.was_preempted or not self._cache.scores:
            return index  # the log-probabilities of a step under way come before those behind it
        while index < most:
            if not self.scores.is_known(sequence, index, self.digest_at(sequence, index)):
                break
            index += 1
        return index

    def first_needed(self, length: int) -> list[tuple[int, int]]:
        """Each group, and the first block that it must have for a hit of `length` blocks."""
        full = [(group, 0) for group in self._full]
        return full + [(group, self._first_seen(size, length)) for group, size in self._windows]

    def digest_at(self, sequence: Sequence, index: int) -> bytes:
        """The digest of a full block."""
        self._digest_all(sequence, index + 1)
        return sequence.digests[index]

    def _full_prefix(self, sequence: Sequence) -> int:
        """Blocks of which groups without a window have all; without such groups, as many as may
        come from the cache at all. A further look begins where the last one ended, or where blocks
        were forgotten since."""
        end = self.num_findable(sequence)
        if not self._full:
            self._digest_all(sequence, end)
            return end
        found = sequence.found
        if found is None:
            first = sequence.content_of(0, self._size)
            if not end or self._cache.known(sequence.root, first) is None:
                return 0  # as most do
            found = sequence.found = Found(len(self._full))
        elif found.blocks:
            self._drop_forgotten(found)
        self._look_on(sequence, found, end)
        return min(found.num_blocks, end)

    def _digest_all(self, sequence: Sequence, num_blocks: int) -> None:
        parent = sequence.digests[-1] if sequence.digests else sequence.root
        for index in range(len(sequence.digests), num_blocks):
            parent = self._digest(sequence, index, parent, sequence.content_of(index, self._size))

    def _look_on(self, sequence: Sequence, found: Found, end: int) -> None:
        """Adds the cached blocks behind those already found, up to the `end`th of the sequence. For
        long prompts this dominates admission time."""
        while found.num_blocks < end:
            index = found.num_blocks
            if not self._take_run(sequence, found, end):
                stop = min(end, index - index % self.run_blocks + self.run_blocks)
                if not self._take_blocks(sequence, found, stop):
                    return

    def _take_run(self, sequence: Sequence, found: Found, end: int) -> bool:
        """Adds a run, if there is one for the next blocks."""
        first, behind = found.num_blocks, found.num_blocks + self.run_blocks
        if first % self.run_blocks or behind > end or sequence.content:
            return False
        digests = sequence.digests
        run = self._cache.run(digests[first - 1] if first else sequence.root)
        ids = sequence.tokens[first * self._size : behind * self._size]
        if run is None or run.ids != ids.tobytes():
            return False
        digests[first:behind] = run.digests
        found.blocks += run.places
        found.entries += run.entries
        found.num_blocks = behind
        return True

    def _take_blocks(self, sequence: Sequence, found: Found, end: int) -> bool:
        """Adds blocks one by one. False: the next one is not cached."""
        cache, digests, full, size = self._cache, sequence.digests, self._full, self._size
        parent = digests[found.num_blocks - 1] if found.num_blocks else sequence.root
        for index in range(found.num_blocks, end):
            known = cache.known(parent, sequence.content_of(index, size))
            if known is None:
                return False
            parent, places = known
            if index == len(digests):
                digests.append(parent)
            for group in full:
                entry = cache.entry(places[group])
                if entry is None:
                    found.cut(index)
                    return False
                found.blocks.append(places[group])
                found.entries.append(entry)
            found.num_blocks += 1
        return True

    def _drop_forgotten(self, found: Found) -> None:
        """A block is forgotten before those that it continues: so it suffices to look at a few."""
        count = found.num_groups

        def is_forgotten(index: int) -> bool:
            part = range(count * index, count * (index + 1))
            return any(self._cache.entry(found.blocks[i]) is not found.entries[i] for i in part)

        if is_forgotten(found.num_blocks - 1):
            found.cut(bisect_left(range(found.num_blocks), True, key=is_forgotten))

    def _window_prefix(self, sequence: Sequence, length: int) -> int:
        """The greatest length up to this one whose end all windows have the blocks for. Where one
        is missing, no prefix that sees it will do: on with the one that ends before it."""
        if not self._windows:
            return length
        while length:
            missing = self._missing(sequence, length)
            if missing is None:
                return length
            length = missing
        return 0

    def _missing(self, sequence: Sequence, length: int) -> int | None:
        """The last block that a prefix of `length` blocks needs and some window lacks."""
        spans = [(group, self._first_seen(window, length)) for group, window in self._windows]
        for index in range(length - 1, min(first for _, first in spans) - 1, -1):
            places = self._places(sequence, index)
            for group, first in spans:
                if index >= first and (places is None or places[group] < 0):
                    return index
        return None

    def _first_seen(self, window: int, length: int) -> int:
        """The first block that the token behind `length` blocks sees."""
        return max(0, length * self._size - window + 1) // self._size

    def _places(self, sequence: Sequence, index: int) -> List[int] | None:
        """The cached blocks of a position whose digest is known."""
        digest = sequence.digests[index]
        if not self._cache.is_known(digest):
            return None
        parent = sequence.digests[index - 1] if index else sequence.root
        return self._cache.find(digest, parent, sequence.content_of(index, self._size))

    def _hit_blocks(self, sequence: Sequence, length: int) -> tuple[I32, ...]:
        count = len(self._full)
        listed = sequence.found.blocks if sequence.found is not None else ()
        found = np.array(listed, np.int32)[: length * count]
        if not self._windows and count == 1:
            return (found,)
        blocks: list[I32] = [self._miss.blocks[0]] * len(self._table.windows)
        for number, group in enumerate(self._full):
            blocks[group] = found[number::count]
        for group, window in self._windows:
            span = range(self._first_seen(window, length), length)
            places = [self._places(sequence, index) for index in span]
            blocks[group] = np.array([at[group] for at in places if at is not None], np.int32)
        return tuple(blocks)

    def _digest(self, sequence: Sequence, index: int, parent: bytes, content: bytes) -> bytes:
        if index == len(sequence.digests):
            sequence.digests.append(self._cache.digest(parent, content))
        return sequence.digests[index]

    def file(self, sequence: Sequence, num_tokens: int) -> None:
        """Puts the full blocks among the first `num_tokens`, whose step came back sound, into the
        prefix cache. Where an equal block is there already, the row changes over to it: so the
        cached ancestors of a cached block are owned by all who own the block, but for those that
        a window lets go."""
        table, row = self._table, sequence.row
        first, end = table.num_cached.item(row), num_tokens // self._size
        own = table.blocks[:, row, first:end]  # (G, blocks)
        if table.has_gaps.item(row):
            own = np.where(table.first[:, row, None] > np.arange(first, end), -1, own)
        digests = sequence.digests
        parent = digests[first - 1] if first else sequence.root
        for index, blocks in enumerate(own.T.tolist(), first):
            content = sequence.content_of(index, self._size)
            if index == len(digests):
                digests.append(self._cache.digest(parent, content))
            digest = digests[index]
            holders = self._cache.insert(blocks, digest, parent, content)
            if holders is None:  # the digest stands for other content
                table.skip_caching(row)
                return
            if list(holders) != blocks:
                self._change_over(row, index, blocks, holders)
            parent = digest
        table.num_cached[row] = end
        if self._full and not sequence.content:
            count = self.run_blocks
            for begin in range(first // count * count, end - count + 1, count):
                self._file_run(sequence, begin)

    def _file_run(self, sequence: Sequence, first: int) -> None:
        """Files the run that begins with this block, all of which is cached."""
        table, size, behind = self._table, self._size, first + self.run_blocks
        blocks = table.blocks[self._full, sequence.row, first:behind].T.ravel()  # (blocks * G,)
        entries = [self._cache.entry(block) for block in blocks.tolist()]
        run = Run(
            ids=sequence.tokens[first * size : behind * size].tobytes(),
            digests=sequence.digests[first:behind],
            places=array("i", blocks.tobytes()),
            entries=[entry for entry in entries if entry is not None],
        )
        assert len(run.entries) == len(entries), first
        self._cache.add_run(sequence.digests[first - 1] if first else sequence.root, run)

    def _change_over(self, row: int, index: int, blocks: list[int], holders: List[int]) -> None:
        """Lets a row use the blocks that were filed before its own."""
        for group, (block, holder) in enumerate(zip(blocks, holders, strict=True)):
            if 0 <= block != holder:
                self._pool.acquire(np.array([holder], np.int32))
                self._pool.release(np.array([block], np.int32))
                self._table.blocks[group, row, index] = holder

    def uncache(self, sequence: Sequence) -> None:
        """Forgets what the sequence filed and no row owns any more, since a window let it go. For
        content that may be broken."""
        for digest in reversed(sequence.digests):
            for group, _ in self._windows:
                self._pool.forget_idle(self._cache.block_of(digest, group))
