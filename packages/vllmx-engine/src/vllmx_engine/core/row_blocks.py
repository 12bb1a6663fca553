"""The KV blocks of running sequences: a block table in each cache group.

In a group without a window a row keeps all its blocks, and a prompt gets them on admission. In a
group with one it owns those that its next token sees and those that the step in preparation writes:
blocks are allocated chunk by chunk and freed once they fall out of the window.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
from vllmx_core.cache.groups import blocks_of
from vllmx_core.plan import I32, AnyArray

from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.prefixes import Hit, Prefixes
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence


class RowBlocks:
    """Takes blocks out of the pool for the rows of a table, and gives them back."""

    def __init__(
        self, limits: Limits, table: RowTable, pool: BlockPool, prefixes: Prefixes
    ) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._table = table
        self._pool = pool
        self._prefixes = prefixes
        windows = limits.windows
        self.num_groups = len(windows)
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._window_groups = np.array(
            [group for group, window in enumerate(windows) if window is not None], np.intp
        )
        self._windows = [window for window in windows if window is not None]
        self._seen_before = np.array([[window - 1] for window in self._windows], np.int32)
        """(W, 1) tokens before its own that one token sees, in each group with a window."""

    @property
    def has_windows(self) -> bool:
        """True if rows free blocks while they run."""
        return bool(self._windows)

    # --- prompts ----------------------------------------------------------------------------------
    def room(self, running: int, prefills: List[Sequence]) -> int:
        """Returns the number of blocks that are available beyond those that running sequences may
        soon need and that unfinished prefills have still to take."""
        room = self._pool.num_available - self.num_groups * running
        for sequence in prefills if self._windows else ():
            room -= self._outstanding(sequence.row)
        return room

    def _outstanding(self, row: int) -> int:
        """Returns the most blocks that a prompt still takes."""
        ahead = int(self._table.num_ahead[row])
        end = int(self._table.num_blocks[row]) - ahead
        owned = end - self._table.first[self._window_groups, row]
        return int(np.clip(self._most(end + ahead) - owned, 0, ahead).sum())

    def _most(self, num_blocks: int) -> I32:
        """(W,) blocks that a prompt of this many owns at most, in each group with a window."""
        tokens, budget = num_blocks * self._size, self._limits.token_budget
        most = [blocks_of((window,), tokens, self._size, budget) for window in self._windows]
        return np.array(most, np.int32)

    def wanted(self, sequence: Sequence, hit: Hit) -> int:
        """Returns the number of available blocks that a sequence's known tokens need behind a hit.
        A sequence that runs alone fits into the whole cache."""
        total = -(-len(sequence.tokens) // self._size)
        wanted = len(self._full) * (total - hit.num_blocks)
        if hit.num_blocks:
            wanted += self._pool.num_idle_of(hit.all_blocks)
        if self._windows:
            wanted += int(np.minimum(self._most(total), total - hit.num_blocks).sum())
        return min(wanted, self._pool.num_blocks)

    def admit(self, sequence: Sequence, client: int, hit: Hit) -> None:
        """Gives a sequence a row with the blocks of a hit, and in groups without a window the
        others of its known tokens too."""
        table, start = self._table, hit.num_blocks
        end = -(-len(sequence.tokens) // self._size)
        table.admit(sequence, client, start)  # first: it may raise
        self._prefixes.scores.take(sequence, start)
        row = sequence.row
        table.num_blocks[row] = end
        if start:
            self._pool.acquire(hit.all_blocks)
            for group, blocks in enumerate(hit.blocks):
                table.first[group, row] = start - blocks.size
                table.blocks[group, row, start - blocks.size : start] = blocks
        for group in self._full:
            table.blocks[group, row, start:end] = self._pool.take(end - start)
        if self._windows:
            table.num_ahead[row] = end - start
        if not self._prefixes.enabled:
            table.skip_caching(row)

    def cover(self, row: int, start: int, size: int, running: int, least: int = 1) -> int:
        """Blocks for a chunk of a prompt, in groups with a window; returns how many of its tokens
        they hold. Where blocks are scarce a chunk gets in each group those of its `least` tokens,
        which it cannot go without, as far as there are any."""
        if not self._windows:
            return size
        table, count = self._table, len(self._windows)
        end = int(table.num_blocks[row] - table.num_ahead[row])
        missing = -(-(start + size) // self._size) - end
        if missing > 0:
            needed = max(1, -(-(start + least) // self._size) - end)
            spare = max(needed * count, self._pool.num_available - self.num_groups * running)
            missing = min(missing, min(spare, self._pool.num_available) // count)
            blocks = self._pool.allocate(missing * count).reshape(count, missing)
            table.blocks[self._window_groups, row, end : end + missing] = blocks
            table.num_ahead[row] -= missing
            end += missing
        return min(size, end * self._size - start)

    # --- every step -------------------------------------------------------------------------------
    def full_rows(self, rows: AnyArray) -> AnyArray:
        """The rows, among these that decode, whose next token begins a block."""
        if not rows.size:
            return rows
        table = self._table
        full: AnyArray = rows[table.computed[rows] >= table.num_blocks[rows] * self._size]
        return full

    def stuck(self, prefills: List[Sequence]) -> int:
        """Blocks without which the first of the unfinished prefills cannot go on."""
        if not self._windows or not prefills:
            return 0
        table, row = self._table, prefills[0].row
        start = int(table.computed[row])
        least = prefills[0].least_chunk(start)
        end = int(table.num_blocks[row] - table.num_ahead[row])
        return len(self._windows) * max(0, -(-(start + least) // self._size) - end)

    def grow(self, rows: AnyArray) -> None:
        """One more block in each group."""
        if rows.size:
            blocks = self._pool.allocate(self.num_groups * rows.size)
            at = self._table.num_blocks[rows]
            self._table.blocks[:, rows, at] = blocks.reshape(self.num_groups, rows.size)
            self._table.num_blocks[rows] += 1

    def extend(self, rows: AnyArray, num_tokens: AnyArray, room: int) -> AnyArray:
        """Blocks in each group, so that rows that decode can hold so many tokens. (R,) False, and
        nothing done, for rows whose blocks, with those of the rows before, are more than `room`."""
        missing = np.maximum(-(-num_tokens // self._size) - self._table.num_blocks[rows], 0)
        fits: AnyArray = (missing == 0) | (np.cumsum(missing) * self.num_groups <= room)
        missing = np.where(fits, missing, 0)
        while missing.any():
            self.grow(rows[missing > 0])
            missing = np.maximum(missing - 1, 0)
        return fits

    def slide(self, rows: AnyArray, *, keep_unfiled: bool = True) -> bool:
        """Gives back the blocks of rows that their next token no longer sees; of them, where
        `keep_unfiled`, those alone that the prefix cache knows, which the others will soon be.
        False when there were none."""
        if not self._windows or not rows.size:
            return False
        table, groups = self._table, self._window_groups
        newest = table.computed[rows]
        if keep_unfiled:
            newest -= table.waits[rows]  # its last token may be taken back
        seen = np.maximum(newest - self._seen_before, 0)
        first = seen // np.int32(self._size)  # (W, R)
        if keep_unfiled:
            np.minimum(first, table.num_cached[rows], out=first)
        begin = table.first[groups[:, None], rows]
        moved = first > begin
        if not moved.any():
            return False
        which, who = np.nonzero(moved)
        if not keep_unfiled:
            table.has_gaps[rows[who]] = True
        lengths = (first - begin)[moved]  # (M,)
        table.first[groups[which], rows[who]] = first[moved]
        offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = np.repeat(begin[moved], lengths) + offset
        gone = table.blocks[np.repeat(groups[which], lengths), np.repeat(rows[who], lengths), index]
        self._pool.release(gone)
        return True

    def leave(self, sequence: Sequence, *, forget: bool) -> None:
        """Takes row and blocks back. `forget`: they are not to be found as prefixes."""
        blocks = self._table.release(sequence)
        if forget:
            self._pool.uncache(blocks)
        self._pool.release(blocks)
        if forget:
            self._prefixes.uncache(sequence)
