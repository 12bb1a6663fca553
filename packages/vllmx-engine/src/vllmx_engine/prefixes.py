"""Which blocks of a sequence come from the prefix cache, and which go there."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from vllmx_core.plan import I32

from vllmx_engine.kv import BlockPool
from vllmx_engine.prefix_cache import PrefixCache
from vllmx_engine.rows import RowTable
from vllmx_engine.sequence import Found, Sequence


class Prefixes:
    """Between the sequences and the cache. With `enabled` False nothing is found; whoever admits a
    row then sees to it that nothing is filed either (`RowTable.never_file`)."""

    def __init__(
        self, table: RowTable, pool: BlockPool, cache: PrefixCache, *, enabled: bool
    ) -> None:
        self.enabled = enabled
        self._table = table
        self._pool = pool
        self._cache = cache

    def cached_blocks(self, sequence: Sequence) -> I32:
        """(blocks,) of its longest cached prefix. The last known token is always computed, because
        its logits are needed; so are tokens that are to be scored. A further look begins where the
        last one ended, or where blocks were forgotten since."""
        if not self.enabled:
            return np.zeros(0, np.int32)
        size = self._table.block_size
        end = len(sequence.tokens) - 1 if sequence.all_scored else sequence.num_scored
        if sequence.found is None:
            sequence.found = Found()
        found = sequence.found
        self._drop_forgotten(found)
        first = len(found.blocks)
        parent = sequence.digests[first - 1] if first else sequence.root
        with memoryview(sequence.tokens) as tokens, tokens.cast("B") as data:
            for index in range(first, end // size):
                part = bytes(data[4 * size * index : 4 * size * (index + 1)])
                digest = self._digest(sequence, index, parent, part)
                block = self._cache.find(digest, parent, part)
                entry = None if block is None else self._cache.entry(block)
                if block is None or entry is None:
                    break
                found.blocks.append(block)
                found.entries.append(entry)
                parent = digest
        return np.array(found.blocks, np.int32)

    def _drop_forgotten(self, found: Found) -> None:
        """A block is forgotten before those that it continues: so it suffices to look at a few."""

        def is_forgotten(index: int) -> bool:
            return self._cache.entry(found.blocks[index]) is not found.entries[index]

        if found.blocks and is_forgotten(len(found.blocks) - 1):
            kept = bisect_left(range(len(found.blocks)), True, key=is_forgotten)
            del found.blocks[kept:], found.entries[kept:]

    def _digest(self, sequence: Sequence, index: int, parent: bytes, tokens: bytes) -> bytes:
        if index == len(sequence.digests):
            sequence.digests.append(self._cache.digest(parent, tokens))
        return sequence.digests[index]

    def file(self, sequence: Sequence, num_tokens: int) -> None:
        """Puts the full blocks among the first `num_tokens`, whose step came back sound, into the
        prefix cache. Where an equal block is there already, the row changes over to it: so the
        cached ancestors of a cached block are owned by all who own the block."""
        table, row, size = self._table, sequence.row, self._table.block_size
        first, end = int(table.filed[row]), num_tokens // size
        blocks = table.blocks[row]
        parent = sequence.digests[first - 1] if first else sequence.root
        for index in range(first, end):
            tokens = sequence.tokens[index * size : (index + 1) * size].tobytes()
            digest = self._digest(sequence, index, parent, tokens)
            block = int(blocks[index])
            holder = self._cache.insert(block, digest, parent, tokens)
            if holder is None:  # the digest stands for other tokens
                table.never_file(row)
                return
            if holder != block:
                self._pool.acquire(np.array([holder], np.int32))
                self._pool.release(blocks[index : index + 1].copy())
                blocks[index] = holder
            parent = digest
        table.filed[row] = end
