"""Which blocks of a sequence come from the prefix cache, and which go there."""

from __future__ import annotations

from vllmx_engine.kv import BlockPool
from vllmx_engine.prefix_cache import PrefixCache
from vllmx_engine.rows import RowTable
from vllmx_engine.sequence import Sequence


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

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Of its longest cached prefix. The last known token is always computed, because its logits
        are needed; so are tokens that are to be scored."""
        blocks: list[int] = []
        if not self.enabled:
            return blocks
        size = self._table.block_size
        end = len(sequence.tokens) - 1 if sequence.all_scored else sequence.num_scored
        most = end // size
        tokens = sequence.tokens[: most * size].tobytes()
        parent = sequence.root
        for index in range(most):
            part = tokens[4 * size * index : 4 * size * (index + 1)]
            digest = self._digest(sequence, index, parent, part)
            block = self._cache.find(digest, parent, part)
            if block is None:
                break
            blocks.append(block)
            parent = digest
        return blocks

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
                self._pool.acquire([holder])
                self._pool.release(blocks[index : index + 1].copy())
                blocks[index] = holder
            parent = digest
        table.filed[row] = end
