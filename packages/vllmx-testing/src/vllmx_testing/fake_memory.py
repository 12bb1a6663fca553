"""Memory of the fake backend: a word for each slot of the KV cache in each cache group, and a word
for each state slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from vllmx_core.backend import MovableCache
from vllmx_core.backend_kit.host_rows import HostRows
from vllmx_core.plan import I32, U64, StepPlan

from vllmx_testing.fake_rules import STATE_GROUP, advance, entries, position_weights

_POISON = np.uint64(0xDEADBEEFDEADBEEF)
_CHUNK_WORDS = 1 << 20


class FakeMemory:
    """Pages and states, full of poison at first.

    Args:
        windows: of each cache group.
        num_pages: of the cache, and tokens in each.
        num_states: slots; 0 without recurrent layers.
        verify_pages: read every page of every row; False reads the newest one alone.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        num_pages: tuple[int, int],
        num_states: int,
        *,
        verify_pages: bool,
    ) -> None:
        self._windows = windows
        self._size = num_pages[1]
        self._verify_pages = verify_pages
        self.pages = np.full(num_pages, _POISON)  # (blocks, P)
        self._prefix = np.full(num_pages, _POISON)  # (blocks, P)
        self.states = np.full(num_states, _POISON)  # (slots,)
        self._weights = position_weights(1024)

    def movable(self, settle: Callable[[], None]) -> MovableCache:
        """Pages and states as rows; see `vllmx_core.backend.HasMovableCache`."""
        states = HostRows([self.states], settle) if self.states.size else None
        return MovableCache(HostRows([self.pages, self._prefix], settle), states, False)

    def pass_through(self, plan: StepPlan, tokens: I32) -> U64:
        """Takes the tokens of a step in. Returns (L,) what came up to each logit row's token, as
        its pages and its state hold it."""
        self._write(plan, tokens)
        return self._read(plan) + self._advance(plan, tokens)

    def _write(self, plan: StepPlan, tokens: I32) -> None:
        """Entries into both caches; the running sum continues from the row's token before."""
        weights = self._weights_to(int(plan.positions.max(initial=-1)) + 1)[plan.positions]
        first = plan.query_start[:-1]
        lengths = np.diff(plan.query_start)
        before = plan.positions[first] - 1  # (R,)
        for group, window in enumerate(self._windows):
            table, slots = plan.block_tables[group], plan.slots[group]
            fresh = entries(tokens, plan.positions, group)  # (T,)
            self.pages.reshape(-1)[slots] = fresh
            if window is not None:
                continue
            terms = fresh * weights
            sums = np.cumsum(terms, dtype=np.uint64)  # (T,)
            block = table[np.arange(plan.num_rows), np.maximum(before, 0) // self._size]
            start = np.where(before >= 0, self._prefix[block, before % self._size], np.uint64(0))
            start += terms[first] - sums[first]
            self._prefix.reshape(-1)[slots] = sums + np.repeat(start, lengths)

    def _advance(self, plan: StepPlan, tokens: I32) -> U64:
        """(L,) the state behind each logit row's token; zeros without states."""
        source, target = plan.state_from, plan.state_to
        if source is None or target is None:
            return np.zeros(plan.num_logit_rows, np.uint64)
        states = np.where(source < 0, np.uint64(0), self.states[source])  # (R,)
        fresh = entries(tokens, plan.positions, STATE_GROUP)
        passed = advance(states, fresh, plan.query_start)
        self.states[target] = states
        if plan.state_after is not None:
            kept = plan.state_after >= 0
            self.states[plan.state_after[kept]] = passed[kept]
        return passed[plan.logit_rows]

    def _read(self, plan: StepPlan) -> U64:
        """(L,) history up to each logit row's token, as the pages hold it."""
        row = np.searchsorted(plan.query_start, plan.logit_rows, side="right") - 1  # (L,)
        length = plan.positions[plan.logit_rows] + 1  # (L,)
        history = np.zeros(row.shape[0], np.uint64)
        for table, window in zip(plan.block_tables, self._windows, strict=True):
            if window is None and not self._verify_pages:
                block = table[row, (length - 1) // self._size]
                history += self._prefix[block, (length - 1) % self._size]
                continue
            widest = int(length.max(initial=0)) + self._size
            at_once = max(1, _CHUNK_WORDS // widest)
            for start in range(0, row.shape[0], at_once):
                part = slice(start, start + at_once)
                history[part] += self._read_pages(table[row[part]], length[part], window)
        return history

    def _read_pages(self, table: I32, length: I32, window: int | None) -> U64:
        """table (N, B), length (N,) -> (N,) sums over the tokens that the newest one sees."""
        blocks = -(-int(length.max()) // self._size)
        weights = self._weights_to(blocks * self._size)[: blocks * self._size]
        seen = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
        block = np.arange(blocks)
        used = (block * self._size < length[:, None]) & (block >= seen[:, None] // self._size)
        held = self.pages[np.where(used, table[:, :blocks], 0)]  # (N, blocks, P)
        held = held.reshape(length.shape[0], -1) * weights
        position = np.arange(held.shape[1])
        held[(position >= length[:, None]) | (position < seen[:, None])] = 0
        total: U64 = held.sum(axis=1, dtype=np.uint64)
        return total

    def _weights_to(self, length: int) -> U64:
        if length > self._weights.shape[0]:
            self._weights = position_weights(2 * length)
        return self._weights
