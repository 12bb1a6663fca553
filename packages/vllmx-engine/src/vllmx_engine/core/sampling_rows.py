"""Sampling parameters of a step's logit rows, gathered from the row table."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import (
    F32,
    I32,
    MAX_LISTED_LOGPROBS,
    U32,
    AnyArray,
    LogitEdits,
    SamplingRows,
    StepPlan,
    TokenCounts,
)
from vllmx_core.records import MutableRecord, field

from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.grammar_masks import Constrained, GrammarMasks, fill_drafted
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.logit_rules import LogitRules
from vllmx_engine.core.rows import FLOAT_DEFAULTS, FLOAT_FIELDS, RowTable
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speech_rules import SpeechRow
from vllmx_engine.core.step_work import Batch

_FLOAT_DEFAULTS: F32 = np.array([list(FLOAT_DEFAULTS.values())], np.float32).T  # (fields, 1)

_NO_STARTS: I32 = np.zeros(0, np.int32)
NOTHING_SAMPLED = SamplingRows.greedy(0)
"""The result of sampling of a step whose model gives vectors or scores."""

Number = TypeVar("Number", np.int32, np.float32)


class Scored(MutableRecord):
    """Logit rows that score prompt tokens: row `first + i` scores token `start + i + 1`."""

    sequence: Sequence
    first: int
    start: int
    count: int

    @property
    def num_logprobs(self) -> int:
        wanted = self.sequence.request.params.prompt_logprobs
        assert wanted is not None, "scored without being asked to"
        return wanted


class LogitOwners(MutableRecord):
    """The sequences that a step's logit rows belong to, and what each gets. S rows sample a token,
    those with drafts one more for each draft token."""

    rows: AnyArray  # (S,) rows of the table
    logits: I32  # (S,) their first logit rows, ascending
    sequences: list[Sequence]  # S of them
    scored: list[Scored] = field(default_factory=list)
    drafts: Drafts | None = None
    """The draft tokens of the first ones of these rows, see `Drafts.index`."""
    edited: list[tuple[int, Sequence, LogitRules, list[int]]] = field(default_factory=list)
    masked: list[tuple[int, U32]] = field(default_factory=list)
    counted: list[tuple[int, array[int], array[int]]] = field(default_factory=list)
    """Logit rows with edits (and the draft tokens before them), masks and penalties, ascending."""
    constrained: list[Constrained] = field(default_factory=list)
    """Logit rows with grammars; their masks follow those of `masked`."""
    drafted: list[tuple[int, list[Constrained]]] = field(default_factory=list)
    """The number of each draft of a row with a grammar, and its logit rows; their masks come
    last."""
    lost: list[Sequence] = field(default_factory=list)
    """Sequences of these whose masks must be made elsewhere; what the step samples for them counts
    for nothing."""
    whole: I32 | None = None
    """`SamplingRows.whole`."""
    broken: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences whose rules raised."""
    ended: list[Sequence] = field(default_factory=list)
    """Sequences that turn out to have ended with the step before."""

    @property
    def all_constrained(self) -> list[Constrained]:
        """The logit rows with grammars, in the order of their masks."""
        return [*self.constrained, *chain.from_iterable(group for _, group in self.drafted)]


class RowsBuilder:
    """Keeps the arrays of the last step of decodes alone: while the same rows decode, with as many
    draft tokens, nothing but positions changes, and nothing else is gathered again."""

    def __init__(self, table: RowTable, limits: Limits) -> None:
        self._table = table
        self._limits = limits
        self._grammars = GrammarMasks()
        self._kept: tuple[int, AnyArray, I32, LogitOwners, SamplingRows] | None = None

    def build(
        self, batch: Batch, rows: AnyArray, plan: StepPlan
    ) -> tuple[LogitOwners, SamplingRows]:
        """Builds the sampling rows for the plan of `batch`, whose rows of the table are `rows`;
        `edit` puts the edits in."""
        owners, sampling = self._gathered(batch, rows, plan)
        if owners.counted:
            sampling.counts = _counts(owners.counted, plan)
        return owners, sampling

    def edit(
        self,
        owners: LogitOwners,
        sampling: SamplingRows,
        number: int,
        patience: Callable[[], float],
        may_be_late: Callable[[Sequence], bool],
    ) -> list[Sequence]:
        """Puts in, for step `number`, grammars, bans and biases as the tokens that the host knows
        by now have them. Returns the sequences that `may_be_late` and whose masks take more than
        `patience()` seconds: what the step samples for them counts for nothing."""
        late: list[Sequence] = []
        if owners.constrained:
            filled = self._grammars.fill(owners.constrained, number, patience, may_be_late)
            owners.broken += filled.failed
            owners.ended += filled.ended
            late = filled.late
        for number, group in owners.drafted:
            self._fill_drafted(number, group, owners)
        if owners.edited:
            sampling.edits = _edits(owners, sampling)
        return late

    @staticmethod
    def _fill_drafted(number: int, group: list[Constrained], owners: LogitOwners) -> None:
        """Fills the masks of a row with a grammar and a draft, which may cut the draft."""
        sequence, drafts = group[0].sequence, owners.drafts
        assert drafts is not None, sequence.request_id
        draft = drafts.ids_of(number)
        try:
            is_lost = not fill_drafted(group, draft)
            drafts.counts[number] = len(draft)
        except Exception as error:  # one request's fault must not stop the others
            owners.broken.append((sequence, error))
            return
        if is_lost:
            owners.lost.append(sequence)

    def close(self) -> None:
        """Ends the threads that make masks."""
        self._grammars.close()

    def _gathered(
        self, batch: Batch, rows: AnyArray, plan: StepPlan
    ) -> tuple[LogitOwners, SamplingRows]:
        if batch.chunks:
            owners = self._mixed_owners(batch)
            return owners, self._gather(owners, plan.positions[plan.logit_rows] + np.int32(1))
        position, starts, drafts = plan.context_len, _NO_STARTS, batch.drafts
        if drafts is not None:
            position, starts = plan.positions + np.int32(1), plan.query_start
        if self._kept is not None:
            version, kept, kept_starts, owners, sampling = self._kept
            same = version == self._table.version and kept_starts.size == starts.size
            same = same and kept.size == rows.size and not np.count_nonzero(kept != rows)
            if same and (drafts is None or (kept_starts == starts).all()):
                sampling.position = position
                if drafts is not None:
                    owners = LogitOwners(rows, owners.logits, owners.sequences, drafts=drafts)
                return owners, sampling
        owners = self._mixed_owners(batch)
        sampling = self._gather(owners, position)
        if drafts is None or self._table.is_simple[rows].all():
            self._kept = self._table.version, rows, starts.copy(), owners, sampling
        return owners, sampling

    def _owners(self, rows: AnyArray, logits: I32, drafts: Drafts | None = None) -> LogitOwners:
        """The owners of sampling rows: row `rows[i]` of the table draws from logit row
        `logits[i]`, and from one more behind it for each token of its draft."""
        owners = LogitOwners(rows, logits, self._table.owners(rows), drafts=drafts)
        others = np.flatnonzero(~self._table.is_simple[rows]).tolist()
        numbers: dict[int, int] = {}
        if drafts is not None and others:
            numbers = {index: number for number, index in enumerate(drafts.index.tolist())}
        for index in others:
            sequence = owners.sequences[index]
            rules = sequence.rules
            if rules is None and sequence.grammar is None:
                continue
            logit = int(logits[index])
            if drafts is not None and index in numbers:
                _own_drafted(owners, sequence, logit, numbers[index], drafts)
                continue
            if sequence.grammar is not None:
                owners.constrained.append(Constrained(logit, sequence))
            if rules is None:
                continue
            if rules.has_edits:
                owners.edited.append((logit, sequence, rules, []))
            if rules.mask is not None and sequence.grammar is None:
                owners.masked.append((logit, rules.mask))
            if (counts := rules.counts) is not None:
                owners.counted.append((logit, counts.ids, counts.output_counts))
        return owners

    def _mixed_owners(self, batch: Batch) -> LogitOwners:
        counts = batch.decode_lengths
        ends = np.cumsum(counts)
        next_logit = int(ends[-1]) if ends.size else 0
        sampling: list[int] = []
        logits: list[int] = []
        scored: list[Scored] = []
        for chunk in batch.chunks:
            count = chunk.num_logits - chunk.samples
            if count and not self._limits.pools:
                start = chunk.start + chunk.num_tokens - chunk.num_logits
                scored.append(Scored(chunk.sequence, next_logit, start, count))
            next_logit += chunk.num_logits
            if chunk.samples:
                sampling.append(chunk.sequence.row)
                logits.append(next_logit - 1)
        rows = np.concatenate([batch.decodes, np.array(sampling, np.int64)])
        first = np.concatenate([ends - counts, np.array(logits, np.int64)]).astype(np.int32)
        owners = self._owners(rows, first, batch.drafts)
        owners.scored = scored
        return owners

    def _gather(self, owners: LogitOwners, position: I32) -> SamplingRows:
        """position (L,). Rows that score get the defaults."""
        table, rows, num_logits = self._table, owners.rows, position.size
        target = np.full(num_logits, -1, np.int32)
        at: AnyArray = owners.logits
        if owners.drafts is not None:
            counts = np.ones(rows.size, np.int32)
            counts[owners.drafts.index] += owners.drafts.counts
            rows = np.repeat(rows, counts)
            at = np.repeat(at - (np.cumsum(counts) - counts), counts) + np.arange(rows.size)
        floats: F32 = np.ascontiguousarray(table.floats[rows].T)
        top_k, seed, num_logprobs = table.top_k[rows], table.seed[rows], table.num_logprobs[rows]
        if owners.scored:
            sampled = floats, top_k, seed, num_logprobs
            floats = np.repeat(_FLOAT_DEFAULTS, num_logits, axis=1)
            top_k, seed = np.zeros(num_logits, np.int32), np.zeros(num_logits, np.uint64)
            num_logprobs = np.full(num_logits, -1, np.int32)
            floats[:, at], top_k[at], seed[at], num_logprobs[at] = sampled
        for part in owners.scored:
            rows_of_part = slice(part.first, part.first + part.count)
            tokens = part.sequence.tokens[part.start + 1 : part.start + 1 + part.count]
            target[rows_of_part] = tokens
            num_logprobs[rows_of_part] = part.num_logprobs
        most = int(num_logprobs.max(initial=-1))
        if most > MAX_LISTED_LOGPROBS:
            wide = num_logprobs > MAX_LISTED_LOGPROBS
            owners.whole = np.flatnonzero(wide).astype(np.int32)
            num_logprobs[wide] = 0
            most = int(num_logprobs.max())
        sampling = SamplingRows(
            **dict(zip(FLOAT_FIELDS, floats, strict=True)),
            top_k=top_k,
            seed=seed,
            position=position,
            target=target,
            num_logprobs=num_logprobs,
            max_logprobs=most,
            all_greedy=not floats[0].any(),
            whole=owners.whole,
        )
        if owners.masked or owners.constrained or owners.drafted:
            self._place_masks(owners, sampling)
        return sampling

    def _place_masks(self, owners: LogitOwners, sampling: SamplingRows) -> None:
        """Masks that stay as they are, then room for those that `edit` fills."""
        constrained = owners.all_constrained
        logits = [logit for logit, _ in owners.masked] + [row.logit for row in constrained]
        sampling.mask_index = np.full(sampling.num_rows, -1, np.int32)
        sampling.mask_index[logits] = range(len(logits))
        masks = np.zeros((len(logits), (self._limits.vocab_size + 31) // 32), np.uint32)
        for index, (_, mask) in enumerate(owners.masked):
            masks[index] = mask
        for index, row in enumerate(constrained, len(owners.masked)):
            row.mask = masks[index]
            if isinstance(row.sequence.grammar, SpeechRow):
                if sampling.group_from is None:
                    sampling.group_from = np.full(sampling.num_rows, -1, np.int32)
                sampling.group_from[row.logit] = row.sequence.grammar.group_from
        sampling.masks = masks


def _own_drafted(
    owners: LogitOwners, sequence: Sequence, first: int, number: int, drafts: Drafts
) -> None:
    """Adds the logit rows of a row with a draft, each with the draft tokens before it."""
    draft = drafts.ids_of(number)
    rules, num_logits = sequence.rules, len(draft) + 1
    if sequence.grammar is not None:
        group = [Constrained(first + place, sequence) for place in range(num_logits)]
        owners.drafted.append((number, group))
    if rules is None:
        return
    counts = None if rules.counts is None else rules.counts.copy()
    for place in range(num_logits):
        if rules.has_edits:
            owners.edited.append((first + place, sequence, rules, draft[:place]))
        if rules.mask is not None and sequence.grammar is None:
            owners.masked.append((first + place, rules.mask))
        if counts is not None:
            owners.counted.append((first + place, counts.ids[:], counts.output_counts[:]))
            if place < len(draft):
                counts.add(draft[place])


def _edits(owners: LogitOwners, sampling: SamplingRows) -> LogitEdits:
    """Bans and biases, which may change from step to step."""
    logits: list[int] = []
    ids: list[array[int]] = []
    values: list[array[float]] = []
    must_end = {row.logit for row in owners.all_constrained if row.must_end}
    for logit, sequence, rules, draft in owners.edited:
        try:
            generated = int(sampling.position[logit]) - sequence.num_prompt
            if logit in must_end:
                generated = max(generated, rules.min_tokens)
            own_ids, own_values = rules.edits(sequence.tokens, generated, draft)
        except Exception as error:  # one request's fault must not stop the others
            owners.broken.append((sequence, error))
            continue
        logits.append(logit)
        ids.append(own_ids)
        values.append(own_values)
    start = _starts(logits, ids, sampling.num_rows)
    return LogitEdits(start, _flat(ids, np.int32), _flat(values, np.float32))


def _counts(counted: list[tuple[int, array[int], array[int]]], plan: StepPlan) -> TokenCounts:
    """Returns the counts of tokens that rows have seen, which grow from step to step."""
    logits = [logit for logit, _, _ in counted]
    ids = [ids_of_row for _, ids_of_row, _ in counted]
    values = _flat([counts for _, _, counts in counted], np.int32)
    start = _starts(logits, ids, plan.num_logit_rows)
    return TokenCounts(start, _flat(ids, np.int32), values, plan.tokens[plan.logit_rows] < 0)


def _starts(logits: list[int], ids: list[array[int]], num_rows: int) -> I32:
    """(num_rows + 1,) where each logit row's entries begin; `logits` ascending."""
    start = np.zeros(num_rows + 1, np.int32)
    start[1:][logits] = [len(row) for row in ids]
    return np.cumsum(start, out=start)


def _flat(rows: list[array[int]] | list[array[float]], dtype: type[Number]) -> npt.NDArray[Number]:
    """One array of all rows, whose items have the same size."""
    return np.frombuffer(bytearray().join(rows), dtype)
