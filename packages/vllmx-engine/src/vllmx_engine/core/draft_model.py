"""A second model that drafts: it draws its tokens as the target would, with the same noise.

The noise of a draw depends on seed and position alone, so two models with close distributions
mostly pick the same token, at any temperature (Daliri, Musco and Suresh 2024).

The draft model keeps keys and values in blocks of the same numbers as the target's. It computes
what it lacks of a sequence when it drafts for it; blocks that it computed for one sequence serve
all that find them as a prefix.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
from vllmx_core.backend import LoadedModel, StepHandle
from vllmx_core.plan import I32, AnyArray, SamplingRows, StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.drafters import Draft, Guess
from vllmx_engine.core.rows import FLOAT_FIELDS, RowTable, known_tokens
from vllmx_engine.core.sequence import Sequence

logger = logging.getLogger("vllmx.draft")

_MAX_FAILURES = 3
"""Steps that fail one after the other until nothing is drafted any more."""
_UNKNOWN = -1


class _Computed(MutableRecord):
    """The part of a sequence whose keys and values the draft model has."""

    epoch: int
    """`RowTable.epoch` of its row."""
    num_tokens: int = 0
    num_drafted: int = 0
    """Draft tokens behind them, until it is known which are kept."""
    blocks: I32 | None = None
    """The blocks that hold them."""
    num_noted: int = 0
    """The first so many blocks are noted by their digests."""


class DraftModel:
    """A `Drafter` whose guesses are filled in by `fill`, for all rows of a step at once.

    Args:
        model: closed by `close`. Its vocabulary is the target's.
        table: the target's rows.
        group: the target's cache group whose block table it uses, one without a window.
        shares_pages: it reads and writes the target's own pages, which have all known tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        table: RowTable,
        group: int,
        vocab_size: int,
        max_model_len: int,
        *,
        shares_pages: bool,
    ) -> None:
        self._model = model
        self._table = table
        self._group = group
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._shares_pages = shares_pages
        self._rows: dict[str, _Computed] = {}
        self._digests: list[bytes] = [b""] * model.info.num_kv_blocks
        """The digest of the content that the draft model computed into each block."""
        self._num_failures = 0
        self.step_s = 0.0
        """The device time of its last step with one token a row."""

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """Reserves `most` tokens, which `fill` replaces; fewer near the end of its context."""
        most = min(most, self._max_model_len - len(sequence.tokens))
        return Guess([_UNKNOWN] * most)

    @property
    def has_failed(self) -> bool:
        """See `DraftsByModel`."""
        return self._num_failures >= _MAX_FAILURES

    def ended(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._rows.pop(sequence.request_id, None)

    def verified(self, sequence: Sequence) -> None:
        """The sequence has the draft tokens that were kept."""
        row = self._rows.get(sequence.request_id)
        if row is not None:
            known = len(sequence.tokens) - 1
            row.num_tokens = min(row.num_tokens + row.num_drafted, known)
            row.num_drafted = 0

    def close(self) -> None:
        """Closes the model."""
        self._model.close()

    # --- a step -----------------------------------------------------------------------------------
    def fill(self, drafts: list[Draft]) -> None:
        """Replaces the ids of drafts by tokens that the model draws; there are none for sequences
        of which it lacks much, and for all where it fails."""
        handles: deque[StepHandle] = deque()
        try:
            self._fill(sorted(drafts, key=lambda draft: -len(draft.ids)), handles)
            self._num_failures = 0
        except Exception:  # whatever a backend raises: the target goes on without
            self._num_failures += 1
            logger.exception("the draft model failed (%d in a row)", self._num_failures)
            if self._num_failures >= _MAX_FAILURES:
                logger.error("nothing is drafted any more: restart to try again")
            for draft in drafts:
                draft.ids.clear()
                self._rows.pop(draft.sequence.request_id, None)
            self._drain(handles)

    @staticmethod
    def _drain(handles: deque[StepHandle]) -> None:
        for handle in handles:
            try:
                handle.result()
            except Exception:  # one failed already
                logger.debug("a later step of the draft model failed too", exc_info=True)

    def _fill(self, drafts: list[Draft], handles: deque[StepHandle]) -> None:
        counts = [len(draft.ids) for draft in drafts]
        active, behind, plan = self._first_plan(drafts)
        found: list[list[int]] = [[] for _ in active]
        rows = np.array([draft.sequence.row for draft in active], np.int64)
        positions = np.array([len(draft.sequence.tokens) for draft in active], np.int32)
        for place in range(max(counts)):
            num_rows = sum(len(draft.ids) > place for draft in active)
            if place:
                if not num_rows:
                    break
                plan = self._next_plan(rows[:num_rows], positions[:num_rows] + place - 1)
            sampling = self._sampling(rows[:num_rows], positions[:num_rows] + place)
            handles.append(self._model.step(plan, sampling))
            if len(handles) > 1:
                self._take(handles.popleft(), found)
        while handles:
            self._take(handles.popleft(), found)
        for draft, ids in zip(active, found, strict=True):
            row = self._rows[draft.sequence.request_id]
            row.num_tokens = len(draft.sequence.tokens)
            row.num_drafted = max(0, len(ids) - 1)
            bad = [i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size]
            draft.ids[:] = ids[: bad[0]] if bad else ids
            self._remember(draft.sequence, row)
        for draft, num_tokens in behind:
            row = self._rows[draft.sequence.request_id]
            row.num_tokens = num_tokens
            self._remember(draft.sequence, row)

    def _take(self, handle: StepHandle, found: list[list[int]]) -> None:
        result = handle.result()
        self.step_s = result.elapsed_s
        for ids, token in zip(found, result.ids.tolist(), strict=False):
            ids.append(token)

    def _first_plan(
        self, drafts: list[Draft]
    ) -> tuple[list[Draft], list[tuple[Draft, int]], StepPlan]:
        """Plans the step that computes what the model lacks of each sequence. Returns the drafts
        whose last known token it reaches, and the others, which go on without a draft, with the
        number of tokens that it reaches."""
        room = self._model.info.max_num_batched_tokens - len(drafts)
        active: list[Draft] = []
        behind: list[tuple[Draft, int, int]] = []
        parts: list[tuple[Draft, int, int]] = []
        written: set[int] = set()
        for draft in drafts:
            start, end = self._start(draft.sequence), len(draft.sequence.tokens)
            size = min(end - start, room + 1)
            blocks = self._blocks(draft.sequence)[start // self._table.block_size :].tolist()
            if not written.isdisjoint(blocks):  # another row computes them in this step
                draft.ids.clear()
                continue
            written.update(blocks)
            room -= size - 1
            if start + size == end:
                active.append(draft)
                parts.append((draft, start, size))
            else:
                draft.ids.clear()
                behind.append((draft, start, size))
        parts += behind
        if not self._shares_pages:
            for block in written:
                self._digests[block] = b""
        lengths = np.array([size for _, _, size in parts], np.int32)
        query_start = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        tokens = [known_tokens(one.sequence, start, start + size) for one, start, size in parts]
        positions = [np.arange(start, start + size, dtype=np.int32) for _, start, size in parts]
        rows = np.array([draft.sequence.row for draft, _, _ in parts], np.int64)
        plan = self._plan(
            rows,
            np.concatenate(tokens),
            np.concatenate(positions),
            query_start,
            query_start[1 : len(active) + 1] - np.int32(1),
        )
        return active, [(draft, start + size) for draft, start, size in behind], plan

    def _start(self, sequence: Sequence) -> int:
        """The first token that the model has still to compute; never behind the last known one."""
        table, name, last = self._table, sequence.request_id, len(sequence.tokens) - 1
        row = self._rows.get(name)
        if row is None or row.epoch != table.epoch[sequence.row]:
            row = self._rows[name] = _Computed(epoch=int(table.epoch[sequence.row]))
        row.num_drafted = 0  # of a step that counted for nothing
        if self._shares_pages:
            row.num_tokens = last
            return last
        own = self._blocks(sequence)
        known = 0 if row.blocks is None else row.blocks.size
        changed = np.flatnonzero(own[:known] != row.blocks) if known else own[:0]
        if changed.size:
            row.num_tokens = min(row.num_tokens, int(changed[0]) * table.block_size)
            row.num_noted = min(row.num_noted, int(changed[0]))
        # Blocks of a prefix, and those of others that took the place of the row's own.
        block = row.num_tokens // table.block_size
        while (
            block < len(sequence.digests)
            and block < own.size
            and self._digests[own[block]] == sequence.digests[block]
        ):
            block += 1
        row.num_tokens = min(max(row.num_tokens, block * table.block_size), last)
        return row.num_tokens

    def _blocks(self, sequence: Sequence) -> I32:
        count = self._table.num_blocks[sequence.row]
        blocks: I32 = self._table.blocks[self._group, sequence.row, :count]
        return blocks

    def _remember(self, sequence: Sequence, row: _Computed) -> None:
        """Notes which blocks hold what the model has computed."""
        if self._shares_pages:
            return
        row.blocks = self._blocks(sequence)[: -(-row.num_tokens // self._table.block_size)].copy()
        whole = min(row.num_tokens // self._table.block_size, len(sequence.digests))
        for block in range(row.num_noted, whole):
            self._digests[row.blocks[block]] = sequence.digests[block]
        row.num_noted = max(row.num_noted, whole)

    def _next_plan(self, rows: AnyArray, positions: I32) -> StepPlan:
        """One token a row, which the step before drew."""
        count = rows.size
        ascending = np.arange(count + 1, dtype=np.int32)
        return self._plan(rows, -1 - ascending[:count], positions, ascending, ascending[:count])

    def _plan(
        self, rows: AnyArray, tokens: I32, positions: I32, query_start: I32, logit_rows: I32
    ) -> StepPlan:
        table, size = self._table, self._table.block_size
        lengths = np.diff(query_start)
        context_len = positions[query_start[1:] - 1] + np.int32(1)
        width = -(-int(context_len.max()) // size)
        tables = table.blocks[self._group, rows, :width]  # (R, B)
        owners = np.repeat(np.arange(rows.size), lengths)
        slots = tables[owners, positions // size] * np.int32(size) + positions % np.int32(size)
        groups = len(self._model.info.cache_windows)
        return StepPlan(
            tokens=tokens.astype(np.int32),
            positions=positions.astype(np.int32),
            slots=(slots,) * groups,
            query_start=query_start,
            context_len=context_len.astype(np.int32),
            block_tables=(np.ascontiguousarray(tables),) * groups,
            logit_rows=logit_rows.astype(np.int32),
        )

    def _sampling(self, rows: AnyArray, positions: I32) -> SamplingRows:
        """Parameters of the rows for tokens at these positions. Penalties, bans and masks are left
        to the target: a draft that they forbid is not kept."""
        table, found = self._table, SamplingRows.greedy(rows.size)
        for index, name in enumerate(FLOAT_FIELDS):
            if name.endswith("_penalty"):
                continue
            setattr(found, name, np.ascontiguousarray(table.floats[rows, index]))
        found.top_k, found.seed = table.top_k[rows], table.seed[rows]
        found.position = positions.astype(np.int32)
        found.all_greedy = not found.temperature.any()
        return found
