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
from vllmx_core.config import MAX_DRAFT
from vllmx_core.plan import I32, AnyArray, SamplingRows, StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.rows import FLOAT_FIELDS, RowTable, known_tokens
from vllmx_engine.core.sequence import Sequence

logger = logging.getLogger("vllmx.draft")

_MAX_FAILURES = 3
"""Steps that fail one after the other until nothing is drafted any more."""

Handles = deque[tuple[StepHandle, slice | AnyArray, int | AnyArray]]
"""Steps under way, the numbers of the drafts that they draw for, and the place in these."""


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
        model: closed by `close`.
        table: the target's rows.
        group: the target's cache group whose block table it uses, one without a window, in pages of
            its own.
        num_ids: the first ids, which model and target share: others are not drafted, and the model
            reads the last of them in their place.
        shares_pages: it reads and writes the target's own pages, which have all known tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        table: RowTable,
        group: int,
        num_ids: int,
        max_model_len: int,
        *,
        shares_pages: bool,
    ) -> None:
        self._model = model
        self._table = table
        self._group = group
        self._num_ids = num_ids
        self._max_model_len = max_model_len
        self._shares_pages = shares_pages
        self._rows: dict[str, _Computed] = {}
        self._digests: list[bytes] = [b""] * model.info.num_kv_blocks
        """The digest of the content that the draft model computed into each block."""
        self._num_failures = 0
        self.step_s = 0.0
        """The device time of its last step with one token a row."""

    def longest(self, lengths: I32) -> AnyArray:
        """See `DraftsByModel`: fewer near the end of its context."""
        return np.clip(self._max_model_len - lengths, 0, MAX_DRAFT)

    @property
    def has_failed(self) -> bool:
        """See `DraftsByModel`."""
        return self._num_failures >= _MAX_FAILURES

    def ended(self, sequence: Sequence) -> None:
        self._rows.pop(sequence.request_id, None)

    def verified(self, sequences: list[Sequence]) -> None:
        """See `DraftsByModel`."""
        for sequence in sequences:
            row = self._rows.get(sequence.request_id)
            if row is not None:
                known = len(sequence.tokens) - 1
                row.num_tokens = min(row.num_tokens + row.num_drafted, known)
                row.num_drafted = 0

    def close(self) -> None:
        self._model.close()

    # --- a step -----------------------------------------------------------------------------------
    def fill(self, drafts: Drafts) -> None:
        """Sets the ids of drafts to tokens that the model draws; there are none for sequences of
        which it lacks much, and for all where it fails."""
        handles: Handles = deque()
        try:
            self._fill(drafts, handles)
            self._num_failures = 0
        except Exception:  # whatever a backend raises: the target goes on without
            self._log_failure()
            drafts.counts[:] = 0
            for sequence in drafts.sequences:
                self._rows.pop(sequence.request_id, None)
            self._drain([handle for handle, _, _ in handles])

    def _log_failure(self) -> None:
        self._num_failures += 1
        logger.exception("the draft model failed (%d in a row)", self._num_failures)
        if self._num_failures >= _MAX_FAILURES:
            logger.error("nothing is drafted any more: restart to try again")

    @staticmethod
    def _drain(handles: list[StepHandle]) -> None:
        for handle in handles:
            try:
                handle.result()
            except Exception:  # one failed already
                logger.debug("a later step of the draft model failed too", exc_info=True)

    def _fill(self, drafts: Drafts, handles: Handles) -> None:
        active, behind, plan = self._first_plan(drafts)
        own = drafts.part(active)
        for place in range(own.counts.max(initial=0) or 1):  # the first step may draw nothing
            num_rows = int((own.counts > place).sum())
            positions = own.lengths[:num_rows] + np.int32(place)
            if place:
                plan = self._next_plan(own.rows[:num_rows], positions - 1)
            sampling = self._sampling(own.rows[:num_rows], positions)
            handles.append((self._model.step(plan, sampling), slice(num_rows), place))
            if len(handles) > 1:
                self._take(handles, own)
        while handles:
            self._take(handles, own)
        rows = zip(own.sequences, own.lengths.tolist(), own.counts.tolist(), strict=True)
        reached = [(sequence, length, max(0, count - 1)) for sequence, length, count in rows]
        for sequence, num_tokens, num_drafted in reached + behind:
            row = self._rows[sequence.request_id]
            row.num_tokens, row.num_drafted = num_tokens, num_drafted
            self._remember(sequence, row)
        self._cut_unknown(own)
        drafts.counts[:] = 0
        drafts.put_back(active, own)

    def _cut_unknown(self, drafts: Drafts) -> None:
        """Keeps the ids up to the first that is none of the target's."""
        is_unknown = (drafts.ids < 0) | (drafts.ids >= self._num_ids)
        drafts.cut(np.where(is_unknown.any(1), is_unknown.argmax(1), is_unknown.shape[1]))

    def _take(self, handles: Handles, drafts: Drafts) -> None:
        """Waits for the first step."""
        handle, numbers, place = handles.popleft()
        result = handle.result()
        self.step_s = result.elapsed_s
        if result.ids.size:
            drafts.ids[numbers, place] = result.ids

    def _first_plan(
        self, drafts: Drafts
    ) -> tuple[AnyArray, list[tuple[Sequence, int, int]], StepPlan]:
        """Plans the step that computes what the model lacks of each sequence. Returns the numbers
        of the drafts whose last known token it reaches, the longest first, and other sequences,
        which go on without a draft, with the number of tokens that it reaches, and 0."""
        room = self._model.info.max_num_batched_tokens - len(drafts.sequences)
        active: list[int] = []
        behind: list[tuple[Sequence, int, int]] = []
        parts: list[tuple[Sequence, int, int]] = []
        rest: list[tuple[Sequence, int, int]] = []
        written: set[int] = set()
        for number in np.argsort(-drafts.counts, kind="stable").tolist():
            sequence = drafts.sequences[number]
            start, end = self._start(sequence), len(sequence.tokens)
            size = min(end - start, room + 1)
            blocks = self._blocks(sequence)[start // self._table.block_size :].tolist()
            if not written.isdisjoint(blocks):  # another row computes them in this step
                continue
            written.update(blocks)
            room -= size - 1
            if start + size == end:
                active.append(number)
                parts.append((sequence, start, size))
            else:
                rest.append((sequence, start, size))
                behind.append((sequence, start + size, 0))
        parts += rest
        if not self._shares_pages:
            for block in written:
                self._digests[block] = b""
        lengths = np.array([size for _, _, size in parts], np.int32)
        query_start = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        tokens = [known_tokens(one, start, start + size) for one, start, size in parts]
        positions = [np.arange(start, start + size, dtype=np.int32) for _, start, size in parts]
        rows = np.array([sequence.row for sequence, _, _ in parts], np.int64)
        plan = self._plan(
            rows,
            np.minimum(np.concatenate(tokens), self._num_ids - 1),
            np.concatenate(positions),
            query_start,
            query_start[1 : len(active) + 1] - np.int32(1),
        )
        return np.array(active, np.intp), behind, plan

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
        own = range(len(self._model.info.cache_windows))
        groups = own if self._shares_pages else [self._group for _ in own]
        tables = [np.ascontiguousarray(table.blocks[group, rows, :width]) for group in groups]
        owners = np.repeat(np.arange(rows.size), lengths)
        page, offset = positions // size, positions % np.int32(size)
        return StepPlan(
            tokens=tokens.astype(np.int32),
            positions=positions.astype(np.int32),
            slots=tuple(one[owners, page] * np.int32(size) + offset for one in tables),
            query_start=query_start,
            context_len=context_len.astype(np.int32),
            block_tables=tuple(tables),
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
