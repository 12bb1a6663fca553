"""The owners of KV blocks: reference counts, free blocks, eviction.

Every block is in one of three states: owned (with a count of the rows whose tables list it), free
without content, or idle: free, but holding a cached prefix that can still be hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
from vllmx_core.plan import I32

from vllmx_engine.core.prefix_cache import PrefixCache


class BlockPool:
    """Blocks 0 ... num_blocks - 1.

    A block is the same memory for every cache group, so what one of them frees any other takes.

    Idle blocks are evicted in the order in which they were released. `release` walks a table from
    its tail, and in a group without a window whoever holds a cached block holds its whole cached
    chain, so a block is always released after those that continue it: the least recently used one
    is a leaf, without a search. In a group with a window no block needs those before it.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.evicting: Callable[[Sequence[int]], None] | None = None
        """Told of idle blocks before they are forgotten for new owners."""
        self._cache = cache
        self._refs = np.ones(num_blocks, np.int32)
        """References of each block; a free one without content has its next owner's already, so
        that handing out writes nothing."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}
        """The sessions that pin each block; whoever pins one pins those before it in its chain."""
        self._idle_pinned: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that are evicted when no other is left."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self.num_idle

    @property
    def num_idle(self) -> int:
        """The number of free blocks that hold a cached prefix."""
        return len(self._idle) + len(self._idle_pinned)

    @property
    def num_pinned(self) -> int:
        """The number of blocks that sessions pin."""
        return len(self._pins)

    def allocate(self, count: int) -> I32:
        """(count,) blocks with one reference each; there must be as many."""
        return np.array(self.take(count), np.int32)

    def take(self, count: int) -> list[int]:
        """`allocate` without making an array, which for a few blocks takes longer than the rest."""
        assert count <= self.num_available, (count, self.num_available)
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        if self.evicting is not None and len(taken) < count:
            idle = chain(self._idle, self._idle_pinned)
            self.evicting(list(islice(idle, count - len(taken))))
        while len(taken) < count:
            block, _ = (self._idle or self._idle_pinned).popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def idle_blocks(self) -> list[int]:
        """Idle blocks, the most recently used first: those before the ones that continue them."""
        return [*reversed(self._idle_pinned), *reversed(self._idle)]

    def acquire(self, blocks: I32) -> None:
        """Adds a reference to each of these cached blocks, each of which is given once."""
        for block in blocks[self._refs[blocks] == 0].tolist():
            del self._idle_list(block)[block]
        self._refs[blocks] += 1

    def pin(self, block: int) -> None:
        """Evicts an owned, cached block last, once nobody owns it."""
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """One `pin` fewer. Blocks of a chain are given from its tail on."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            if block in self._idle_pinned:
                del self._idle_pinned[block]
                self._idle[block] = None

    def _idle_list(self, block: int) -> OrderedDict[int, None]:
        return self._idle_pinned if block in self._pins else self._idle

    def _forget(self, block: int) -> None:
        self._cache.remove(block)
        self._pins.pop(block, None)

    def num_idle_of(self, blocks: I32) -> int:
        """Returns the number of these cached blocks that `acquire` would take from the available
        ones."""
        return blocks.size - int(np.count_nonzero(self._refs[blocks])) if blocks.size else 0

    def release(self, blocks: I32) -> None:
        """Drops one reference of each block, in the order in which sequences list them. A block
        that several of them share may stand there as often."""
        np.subtract.at(self._refs, blocks, 1)
        for block in dict.fromkeys(reversed(blocks[self._refs[blocks] == 0].tolist())):
            if block in self._cache:
                self._idle_list(block)[block] = None
            else:
                self._set_free(block)

    def uncache(self, blocks: I32) -> None:
        """Takes these blocks of one table out of the prefix cache, from its tail on, but for those
        that others own or continue. For content that may be broken; to be followed by `release`."""
        for block in reversed(blocks.tolist()):
            if block in self._cache and self._refs[block] == 1 and self._cache.is_leaf(block):
                self._forget(block)

    def forget_idle(self, block: int) -> None:
        """Takes a block that no row owns out of the prefix cache; another is left alone."""
        idle = self._idle_list(block)
        if block in idle:
            del idle[block]
            self._forget(block)
            self._set_free(block)

    def clear_idle(self) -> None:
        """Forgets all prefixes that no row owns."""
        while idle := self._idle or self._idle_pinned:
            block, _ = idle.popitem(last=False)
            self._forget(block)
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._refs[block] = 1
        self._free.append(block)

    def check(self, owned: I32) -> None:
        """Asserts that every block is free, idle or owned exactly as often as `owned` lists it."""
        counts = np.bincount(owned, minlength=self.num_blocks)
        counts[self._free] += 1
        assert np.array_equal(counts, self._refs), "reference counts differ from the tables"
        idle = [*self._idle, *self._idle_pinned]
        counts[self._free] = 0
        assert sorted(self._free + idle) == np.flatnonzero(counts == 0).tolist(), "block lost"
        assert all(block in self._cache for block in idle), "idle without content"
        assert not any(block in self._cache for block in self._free), "free with content"
        assert all(block in self._cache for block in self._pins), "pinned without content"
        assert all(block in self._pins for block in self._idle_pinned), "kept for nobody"
