"""A drafter that drafts a block of tokens in one pass: DFlash.

Its step computes the target's tokens with their hidden states, as a context, and behind those of
each row that drafts a block: the last id and a mask token for each draft token, which see each
other in both directions. Keys and values of a block are overwritten by the next step.
"""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import I32, AnyArray, StepPlan

from vllmx_engine.core.draft_model import Handles
from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.hidden_drafter import HiddenDrafter, Seen


class BlockDrafter(HiddenDrafter):
    """See the module's docstring, and `HiddenDrafter`."""

    def longest(self, lengths: I32) -> AnyArray:
        """See `DraftModel`; at most a block."""
        return np.minimum(super().longest(lengths), self._spec.block)

    def _context(self, plan: StepPlan) -> StepPlan:
        """Each token has a row, through which its projected hidden states reach the layers."""
        plan.tap_rows = plan.own_rows = np.arange(plan.num_tokens, dtype=np.int32)
        return plan

    def _draft(self, seen: Seen, drafts: Drafts, places: AnyArray, handles: Handles) -> None:
        counts, info = drafts.counts, self._model.info
        fits = np.cumsum(counts + 1) <= info.max_num_batched_tokens - seen.plan.num_tokens
        fits &= np.cumsum(counts) <= info.max_logit_rows
        drafts.cut(counts * fits)
        if not fits.any():
            self._compute(seen)
            return
        lives = seen.epochs == self._table.epoch[seen.rows]
        if not lives.all():  # blocks of ended rows may be those of rows that draft by now
            self._compute(seen)
            self._wait(seen.number)
        order = np.argsort(places[fits])  # in which rows lie in the step; those that fit come first
        counts, rows, first = counts[order], drafts.rows[order], drafts.lengths[order]
        ends = np.cumsum(counts)
        along = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        drawn = np.repeat(first, counts) + along.astype(np.int32)
        plan = self._with_blocks(seen, lives, places[order], counts)
        sampling = self._sampling(np.repeat(rows, counts), drawn)
        handles.append((self._model.step(plan, sampling), np.repeat(order, counts), along))
        self._take(handles, drafts)

    def _with_blocks(
        self, seen: Seen, lives: AnyArray, places: AnyArray, counts: AnyArray
    ) -> StepPlan:
        """The step over the tokens of the rows of `seen` that live, in which blocks for `counts`
        draft tokens follow the ascending `places`; what was rejected behind these is left out."""
        old, table, size = seen.plan, self._table, np.int32(self._table.block_size)
        begin, from_last = old.query_start[:-1][lives], self._spec.from_last
        drafting = np.searchsorted(begin, places, side="right") - 1  # rows of the step
        kept, block = np.diff(old.query_start)[lives], np.zeros_like(begin)
        kept[drafting] = places - begin[drafting] + 1
        block[drafting] = counts if from_last else counts + 1
        start: I32 = np.concatenate([[0], np.cumsum(kept + block)]).astype(np.int32)
        owner = np.repeat(np.arange(begin.size), kept + block)  # (T,)
        offset = np.arange(start[-1], dtype=np.int32) - start[owner]
        in_block = offset - kept[owner]  # negative in the context
        is_block, beyond = in_block >= 0, np.maximum(in_block + 1, 0)
        source = begin[owner] + np.minimum(offset, kept[owner] - 1)
        positions = old.positions[source] + beyond
        last = positions[start[1:] - 1]
        context_len = old.context_len[lives]
        context_len[drafting] = last[drafting] + 1
        width = -(-int(context_len.max()) // table.block_size)
        tables = np.zeros((begin.size, width), np.int32)
        tables[:, : old.block_tables[0].shape[1]] = old.block_tables[0][lives, :width]
        tables[drafting] = table.blocks[self._group, seen.rows[lives][drafting], :width]
        slots = tables[owner, positions // size] * size + positions % size
        turns, features, groups = old.rope_positions, old.feature_rows, len(old.slots)
        assert features is not None, "the target keeps the hidden states of all tokens"
        own = np.where(is_block, np.int32(-1), source)
        return StepPlan(
            tokens=np.where(in_block > 0, np.int32(self._spec.mask_token), old.tokens[source]),
            positions=positions,
            slots=(np.where(is_block, slots, old.slots[0][source]),) * groups,
            query_start=start,
            context_len=context_len,
            block_tables=(tables,) * groups,
            logit_rows=np.flatnonzero(in_block >= (not from_last)).astype(np.int32),
            rope_positions=None if turns is None else turns[:, source] + beyond,
            feature_rows=np.where(is_block, np.int32(-1), features[source]),
            tap_rows=own,
            own_rows=own,
            visible_to=np.where(is_block, last[owner], positions),
        )
