"""Turns a `Batch` into the arrays of a step: a `StepPlan` and its `SamplingRows`."""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import I32, AnyArray, SamplingRows, StepPlan
from vllmx_core.records import MutableRecord, field

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.grammar_masks import PATIENCE_S, PATIENCE_SHARE, USUAL_S
from vllmx_engine.core.images import Images
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.row_states import RowStates
from vllmx_engine.core.rows import RowTable, known_tokens
from vllmx_engine.core.sampling_rows import NOTHING_SAMPLED, LogitOwners, RowsBuilder
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.step_budget import Chunk
from vllmx_engine.core.step_work import Batch


class Step(MutableRecord):
    """State that the engine keeps of a launched step in order to commit it."""

    number: int
    batch: Batch
    rows: AnyArray  # (R,)
    epochs: AnyArray  # (R,)
    context_len: I32  # (R,)
    owners: LogitOwners
    waits_for_ids: bool
    """True if its edits need the previous step's ids; `BatchBuilder.edit` then makes them."""
    late: list[Sequence] = field(default_factory=list)
    """Sequences that it brings no token of, because their masks are still being made: they go on
    with `Scheduler.release`."""


class BatchBuilder:
    """Owns the int32 buffers of a step. A plan's rows are the batch's decodes, then its chunks.

    A step of decodes alone costs a fixed number of numpy calls, whatever its rows; where the rows
    are the first ones of the table without a gap, slices take the place of gathers and the block
    tables are the table itself.
    """

    def __init__(
        self,
        table: RowTable,
        limits: Limits,
        cost: StepCost,
        states: RowStates | None = None,
        images: Images | None = None,
    ) -> None:
        self._table = table
        self._cost = cost
        self._states = states
        self._images = images
        self._size = limits.block_size
        self._pools = limits.pools
        self._shift = limits.block_size.bit_length() - 1
        tokens, rows = limits.token_budget, limits.max_rows
        self._tokens = np.zeros(tokens, np.int32)
        self._positions = np.zeros(tokens, np.int32)
        self._tables = list(table.blocks)  # (N, B) of each group
        self._flat = [blocks.reshape(-1) for blocks in table.blocks]  # (N * B,)
        self._slots = [np.zeros(tokens, np.int32) for _ in table.windows]
        self._query_start = np.zeros(rows + 1, np.int32)
        self._context_len = np.zeros(rows, np.int32)
        self._ascending = np.arange(max(tokens, rows) + 1, dtype=np.int32)
        self._first_block = np.arange(rows, dtype=np.int64) * table.blocks.shape[2]
        self._sampling = RowsBuilder(table, limits)

    def build(self, batch: Batch, number: int) -> tuple[StepPlan, SamplingRows, Step]:
        """The step's arrays, good until the next call; moves the table on to the state after it."""
        if batch.chunks:
            rows = np.concatenate([batch.decodes, [c.sequence.row for c in batch.chunks]])
        else:
            rows = batch.decodes
        select = _selector(rows)
        is_mixed = bool(batch.chunks) or batch.drafts is not None
        plan = self._mixed(batch, rows) if is_mixed else self._decode(rows, select)
        plan.block_tables = self._block_tables(rows, select)
        self._see(plan, batch, rows)
        if self._table.num_adapted:
            plan.adapters = self._table.adapter[rows]
        table = self._table
        waits_for_ids = table.wait_for_ids(batch.decodes)
        owners, sampling = self._sampling.build(batch, rows, plan)
        if self._states is not None:
            num_decoded = plan.query_start[batch.decodes.size]
            decodes = [row for row in owners.constrained if row.logit < num_decoded]
            unsure = [row.sequence.row for row in decodes]
            self._states.plan(rows, plan, number, unsure, batch.drafts)
        if self._pools:
            sampling = NOTHING_SAMPLED
            plan.token_types = self._token_types(batch, plan)
        step = Step(
            number=number,
            batch=batch,
            rows=rows,
            epochs=table.epoch[rows],
            context_len=plan.context_len.copy(),
            owners=owners,
            waits_for_ids=waits_for_ids,
        )
        # The next step is prepared while this one runs: the table moves on before its results come.
        table.computed[select] = plan.context_len
        sampled = owners.rows if is_mixed else select
        table.last_token[sampled] = -1 - owners.logits  # references, until `commit` has the ids
        table.sampled_in[sampled] = number
        if batch.drafts is not None:
            table.await_draft(batch.drafts.rows, batch.drafts.lengths - 1)
        # A slow mask would delay every row of the next step: its row sits that step out.
        for row in owners.constrained:
            if row.sequence.grammar is not None and row.sequence.grammar.is_slow:
                row.sequence.grammar.paused_step = number
                table.pause(row.sequence.row)
        if not waits_for_ids:
            self.edit(step, sampling)
        return plan, sampling, step

    def _see(self, plan: StepPlan, batch: Batch, rows: AnyArray) -> None:
        """Sets the rows of image features, and the rotations of rows with images."""
        table = self._table
        if self._images is not None and self._images.crossed:
            for chunk in batch.chunks:
                table.cross[chunk.sequence.row] = self._images.cross_rows(chunk.sequence)
            plan.cross_rows = table.cross[rows]
        elif self._images is not None and batch.chunks:
            starts = plan.query_start[batch.decodes.size : -1].tolist()
            plan.feature_rows = self._images.feature_rows(batch.chunks, starts, plan.num_tokens)
            if plan.feature_rows is not None and self._images.feeds is not None:
                plan.tokens[plan.feature_rows >= 0] = self._images.feeds
            plan.visible_to = self._images.visible_to(batch.chunks, starts, plan.positions)
        if not table.num_turned:
            return
        lengths = np.diff(plan.query_start)
        turned = plan.positions + np.repeat(table.turn[rows], lengths)  # (T,)
        plan.rope_positions = np.repeat(turned[None], table.turn_axes, axis=0)
        for chunk, start in zip(batch.chunks, plan.query_start[batch.decodes.size :], strict=False):
            images = chunk.sequence.images
            if images is not None and images.turns is not None:
                known = images.turns.at(chunk.start, chunk.start + chunk.num_tokens)
                plan.rope_positions[:, start : start + chunk.num_tokens] = known

    def edit(self, step: Step, sampling: SamplingRows) -> None:
        """Fills in the sampling parameters that a step with `waits_for_ids` left out; its ids are
        known by now."""
        late = self._sampling.edit(
            step.owners, sampling, step.number, lambda: self._patience(step), self._may_be_late
        )
        for sequence in step.owners.lost:
            self._table.give_up_draft(sequence.row, sequence.tokens[-1])
            if self._states is not None:
                self._states.resume(sequence, 0)
        step.late += step.owners.lost
        for sequence in late:
            step.context_len[step.rows == sequence.row] -= 1
            self._table.take_back(sequence.row, sequence.tokens[-1])
            if self._states is not None:
                self._states.take_back(sequence.row, step.number)
        if self._states is not None:
            self._states.settle()
        step.late += late

    def _may_be_late(self, sequence: Sequence) -> bool:
        """True if a step can do without a sequence's mask: recurrent states must not advance
        twice."""
        return self._states is None or self._states.can_take_back(sequence.row)

    def _patience(self, step: Step) -> float:
        """The seconds that a step waits for its masks."""
        runs = step.waits_for_ids  # else its forward pass has not begun
        hidden_s = PATIENCE_SHARE * self._cost.predict(step.batch.load) if runs else 0.0
        return max(PATIENCE_S + USUAL_S * len(step.owners.constrained), hidden_s)

    def close(self) -> None:
        """Ends its threads."""
        self._sampling.close()

    def _decode(self, rows: AnyArray, select: AnyArray | slice) -> StepPlan:
        """One token a row."""
        table, count = self._table, rows.size
        positions = self._positions[:count]
        positions[:] = table.computed[select]
        tokens = self._tokens[:count]
        tokens[:] = table.last_token[select]
        context_len = np.add(positions, 1, out=self._context_len[:count])
        return StepPlan(
            tokens=tokens,
            positions=positions,
            slots=self._slots_of(positions, self._first_block[select]),
            query_start=self._ascending[: count + 1],
            context_len=context_len,
            block_tables=(),  # `build` fills them in
            logit_rows=self._ascending[:count],
        )

    def _mixed(self, batch: Batch, rows: AnyArray) -> StepPlan:
        """Decodes and chunks."""
        table, chunks, num_decodes = self._table, batch.chunks, batch.decodes.size
        lengths = np.ones(rows.size, np.int32)
        lengths[:num_decodes] = batch.decode_lengths
        lengths[num_decodes:] = [chunk.num_tokens for chunk in chunks]
        query_start = self._query_start[: rows.size + 1]
        np.cumsum(lengths, out=query_start[1:])
        total = int(query_start[-1])
        first = table.computed[rows]  # (R,) position of each row's first token
        positions = self._positions[:total]
        positions[:] = np.repeat(first - query_start[:-1], lengths)
        positions += self._ascending[:total]
        tokens = self._tokens[:total]
        tokens[query_start[:num_decodes]] = table.last_token[batch.decodes]
        if (drafts := batch.drafts) is not None:
            behind = np.arange(1, drafts.ids.shape[1] + 1)
            at, is_draft = query_start[drafts.index, None] + behind, drafts.is_draft  # (D, K)
            tokens[at[is_draft]] = drafts.ids[is_draft]
        for chunk, start in zip(chunks, query_start[num_decodes:-1].tolist(), strict=True):
            end = chunk.start + chunk.num_tokens
            tokens[start : start + chunk.num_tokens] = known_tokens(
                chunk.sequence, chunk.start, end
            )
        return StepPlan(
            tokens=tokens,
            positions=positions,
            slots=self._slots_of(positions, np.repeat(self._first_block[rows], lengths)),
            query_start=query_start,
            context_len=np.add(first, lengths, out=self._context_len[: rows.size]),
            block_tables=(),  # `build` fills them in
            logit_rows=_logit_rows(num_decodes, chunks, query_start),
        )

    @staticmethod
    def _token_types(batch: Batch, plan: StepPlan) -> I32 | None:
        """(T,) where some prompt of a model that samples nothing has types."""
        if not any(chunk.sequence.request.token_types for chunk in batch.chunks):
            return None
        types = np.zeros(plan.num_tokens, np.int32)
        for chunk, start in zip(batch.chunks, plan.query_start.tolist(), strict=False):
            given = chunk.sequence.request.token_types
            if given:
                part = np.frombuffer(given, np.int32)[chunk.start :][: chunk.num_tokens]
                types[start : start + chunk.num_tokens] = part
        return types

    def _slots_of(self, positions: I32, first_block: AnyArray) -> tuple[I32, ...]:
        """The slots (T,) of each group; `first_block` is where each token's table row begins in the
        flat table."""
        entry = first_block + (positions >> self._shift)
        offset = positions & (self._size - 1)
        found = []
        for flat, buffer in zip(self._flat, self._slots, strict=True):
            slots = buffer[: positions.size]
            np.left_shift(flat[entry], self._shift, out=slots)
            slots |= offset
            found.append(slots)
        return tuple(found)

    def _block_tables(self, rows: AnyArray, select: AnyArray | slice) -> tuple[I32, ...]:
        # Backends read a table up to its width: the unused columns of short rows are not copied.
        widest = int(self._table.num_blocks[select].max())
        if isinstance(select, slice):
            return tuple([blocks[select, :widest] for blocks in self._tables])
        return tuple([blocks[:, :widest].take(rows, axis=0) for blocks in self._tables])


def _selector(rows: AnyArray) -> AnyArray | slice:
    """A slice for rows 0 ... R - 1 in this order, else the rows themselves."""
    if rows[-1] == rows.size - 1 and rows[0] == 0 and not np.count_nonzero(rows[1:] <= rows[:-1]):
        return slice(0, rows.size)
    return rows


def _logit_rows(num_decodes: int, chunks: tuple[Chunk, ...], query_start: I32) -> I32:
    """(L,) the decodes' tokens and the tail of each chunk."""
    parts = [np.arange(query_start[num_decodes], dtype=np.int32)]
    for chunk, end in zip(chunks, query_start[num_decodes + 1 :].tolist(), strict=True):
        parts.append(np.arange(end - chunk.num_logits, end, dtype=np.int32))
    return np.concatenate(parts)
