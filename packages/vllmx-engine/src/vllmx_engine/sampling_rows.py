"""Sampling parameters of a step's logit rows, gathered from the row table."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllmx_core.plan import (
    F32,
    I32,
    AnyArray,
    LogitEdits,
    SamplingRows,
    StepPlan,
    TokenCounts,
)

from vllmx_engine.logit_rules import LogitRules, edit_arrays
from vllmx_engine.rows import FLOAT_FIELDS, RowTable
from vllmx_engine.scheduler import Batch
from vllmx_engine.sequence import Limits, Sequence


@dataclass(slots=True)
class Scored:
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


@dataclass(slots=True)
class LogitOwners:
    """Who gets what from a step's logit rows. S sampling rows."""

    rows: AnyArray  # (S,) rows of the table
    logits: I32  # (S,) their logit rows, ascending
    sequences: list[Sequence]  # S of them
    scored: list[Scored] = field(default_factory=list)
    ruled: list[tuple[int, Sequence, LogitRules]] = field(default_factory=list)
    """Logit rows of sequences with edits, masks or counts."""
    broken: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences whose rules raised."""


class RowsBuilder:
    """Keeps the arrays of the last step of decodes alone: while the same rows decode, nothing but
    positions changes, and nothing else is gathered again."""

    def __init__(self, table: RowTable, limits: Limits) -> None:
        self._table = table
        self._limits = limits
        self._ascending = np.arange(limits.max_rows, dtype=np.int32)
        self._kept: tuple[int, AnyArray, LogitOwners, SamplingRows] | None = None

    def build(
        self, batch: Batch, rows: AnyArray, plan: StepPlan
    ) -> tuple[LogitOwners, SamplingRows]:
        """For the plan of `batch`, whose rows of the table are `rows`."""
        owners, sampling = self._gathered(batch, rows, plan)
        if owners.ruled:
            self._apply_rules(owners, sampling, plan)
        return owners, sampling

    def _gathered(
        self, batch: Batch, rows: AnyArray, plan: StepPlan
    ) -> tuple[LogitOwners, SamplingRows]:
        if batch.chunks:
            owners = self._mixed_owners(batch, rows)
            return owners, self._gather(owners, plan.positions[plan.logit_rows] + np.int32(1))
        if self._kept is not None:
            version, kept, owners, sampling = self._kept
            same = version == self._table.version and kept.size == rows.size
            if same and bool((kept == rows).all()):
                sampling.position = plan.context_len
                return owners, sampling
        owners = self._owners(rows, self._ascending[: rows.size])
        sampling = self._gather(owners, plan.context_len)
        self._kept = self._table.version, rows, owners, sampling
        return owners, sampling

    def _owners(self, rows: AnyArray, logits: I32) -> LogitOwners:
        """Of sampling rows: row `rows[i]` of the table draws from logit row `logits[i]`."""
        sequences: list[Sequence] = []
        ruled: list[tuple[int, Sequence, LogitRules]] = []
        for row, logit in zip(rows.tolist(), logits.tolist(), strict=True):
            sequence = self._table.owner[row]
            assert sequence is not None
            sequences.append(sequence)
            if sequence.rules is not None:
                ruled.append((logit, sequence, sequence.rules))
        return LogitOwners(rows, logits, sequences, ruled=ruled)

    def _mixed_owners(self, batch: Batch, rows: AnyArray) -> LogitOwners:
        next_logit = batch.decodes.size
        sampling, logits = batch.decodes.tolist(), list(range(next_logit))
        scored: list[Scored] = []
        for chunk in batch.chunks:
            count = chunk.num_logits - chunk.samples
            if count:
                start = chunk.start + chunk.num_tokens - chunk.num_logits
                scored.append(Scored(chunk.sequence, next_logit, start, count))
            next_logit += chunk.num_logits
            if chunk.samples:
                sampling.append(chunk.sequence.row)
                logits.append(next_logit - 1)
        owners = self._owners(np.array(sampling, np.int64), np.array(logits, np.int32))
        owners.scored = scored
        return owners

    def _gather(self, owners: LogitOwners, position: I32) -> SamplingRows:
        """position (L,). Rows that score get the defaults."""
        table, rows, num_logits = self._table, owners.rows, position.size
        floats: F32 = np.zeros((len(FLOAT_FIELDS), num_logits), np.float32)
        floats[1] = floats[3] = 1.0  # top_p and repetition_penalty are off at 1
        top_k, seed = np.zeros(num_logits, np.int32), np.zeros(num_logits, np.uint64)
        target, num_logprobs = np.full((2, num_logits), -1, np.int32)
        at = owners.logits
        floats[:, at] = table.floats[:, rows]
        top_k[at], seed[at] = table.top_k[rows], table.seed[rows]
        num_logprobs[at] = table.num_logprobs[rows]
        for part in owners.scored:
            rows_of_part = slice(part.first, part.first + part.count)
            tokens = part.sequence.tokens[part.start + 1 : part.start + 1 + part.count]
            target[rows_of_part] = tokens
            num_logprobs[rows_of_part] = part.num_logprobs
        sampling = SamplingRows(
            **dict(zip(FLOAT_FIELDS, floats, strict=True)),
            top_k=top_k,
            seed=seed,
            position=position,
            target=target,
            num_logprobs=num_logprobs,
            max_logprobs=int(num_logprobs.max(initial=-1)),
            all_greedy=not floats[0].any(),
        )
        self._gather_masks(owners, sampling)
        return sampling

    def _gather_masks(self, owners: LogitOwners, sampling: SamplingRows) -> None:
        masks = [(logit, rules.mask) for logit, _, rules in owners.ruled if rules.mask is not None]
        if masks:
            sampling.mask_index = np.full(sampling.num_rows, -1, np.int32)
            sampling.mask_index[[logit for logit, _ in masks]] = range(len(masks))
            sampling.masks = np.stack([mask for _, mask in masks])

    def _apply_rules(self, owners: LogitOwners, sampling: SamplingRows, plan: StepPlan) -> None:
        """Edits and counts, which change from step to step."""
        count = sampling.num_rows
        edits: list[tuple[int, I32, AnyArray]] = []
        counts: list[tuple[int, I32, AnyArray]] = []
        for logit, sequence, rules in owners.ruled:
            try:
                if rules.has_edits:
                    generated = int(sampling.position[logit]) - sequence.num_prompt
                    start = max(sequence.num_prompt, len(sequence.tokens) - rules.tail)
                    row = rules.edits(sequence.tokens[start:], generated)
                    edits.append((logit, *edit_arrays(row)))
                if rules.counts is not None:
                    counts.append((logit, *rules.counts.arrays()))
            except Exception as error:  # one request's fault must not stop the others
                owners.broken.append((sequence, error))
        sampling.edits = sampling.counts = None
        if edits:
            sampling.edits = LogitEdits(*_compressed(edits, count))
        if counts:
            pending = plan.tokens[plan.logit_rows] < 0
            sampling.counts = TokenCounts(*_compressed(counts, count), pending)


def _compressed(
    entries: list[tuple[int, I32, AnyArray]], num_rows: int
) -> tuple[I32, I32, AnyArray]:
    """Rows (index ascending, ids, values) as (num_rows + 1,) starts and flat ids and values."""
    lengths = np.zeros(num_rows, np.int32)
    for index, ids, _ in entries:
        lengths[index] = ids.size
    start = np.zeros(num_rows + 1, np.int32)
    np.cumsum(lengths, out=start[1:])
    ids = np.concatenate([ids for _, ids, _ in entries])
    return start, ids, np.concatenate([values for _, _, values in entries])
