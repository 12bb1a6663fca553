"""Steps written by hand: the smallest scheduler that drives a `LoadedModel`, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from vllmx_core.backend import LoadedModel, StepHandle
from vllmx_core.plan import I32, SamplingRows, StepPlan, StepResult

Wanted = Literal["none", "last", "all"]


@dataclass(slots=True)
class Row:
    """One row of a step: `tokens` go to positions from `start` on of the sequence that owns
    `blocks`; `logits` says which of them are logit rows."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int] | Sequence[Sequence[int]]
    """The row's blocks of the only cache group, or those of each group."""
    logits: Wanted = "last"
    state: tuple[int, int] | int | None = None
    """The slots that the row of a model with states reads (-1: zeros) and leaves; one number for
    both stands for a sequence that begins where `start` is 0 and lives in that slot."""
    after: Sequence[int] = ()
    """Slots that keep the states after its first tokens as well, -1: none."""
    types: Sequence[int] = ()
    """Token types, 0 for those that are not listed."""
    spans: Sequence[tuple[int, int]] = ()
    """First position and end of runs of tokens that see each other both ways."""

    @property
    def seen(self) -> list[int]:
        """The last position that each token sees."""
        seen = list(range(self.start, self.start + len(self.tokens)))
        for first, end in self.spans:
            seen = [end - 1 if first <= position < end else position for position in seen]
        return seen

    @property
    def state_slots(self) -> tuple[int, int]:
        """The slots that it reads and leaves."""
        if isinstance(self.state, tuple):
            return self.state
        assert self.state is not None, "a row names its slots, or no row does"
        return (self.state if self.start else -1), self.state

    @property
    def tables(self) -> list[list[int]]:
        """The blocks of each group, which are as many."""
        if all(np.ndim(block) == 0 for block in self.blocks):
            return [cast("list[int]", list(self.blocks))]
        return [list(blocks) for blocks in cast("Sequence[Sequence[int]]", self.blocks)]


def make_plan(rows: Sequence[Row], block_size: int) -> StepPlan:
    """The plan of one step. Unused entries of the block tables are -1, table rows are strided."""
    lengths = [len(row.tokens) for row in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    listed = [row.tables for row in rows]
    widest = max((len(blocks) for tables in listed for blocks in tables), default=1)
    groups = range(len(listed[0]) if listed else 1)
    tables = [np.full((len(rows), widest + 3), -1, np.int32) for _ in groups]
    slots: list[list[int]] = [[] for _ in groups]
    positions, logit_rows = [], []
    kept = any(row.state is not None for row in rows)
    for index, row in enumerate(rows):
        for table, blocks in zip(tables, listed[index], strict=True):
            table[index, : len(blocks)] = blocks
        for offset in range(len(row.tokens)):
            position = row.start + offset
            positions.append(position)
            for found, blocks in zip(slots, listed[index], strict=True):
                found.append(blocks[position // block_size] * block_size + position % block_size)
            last = offset == len(row.tokens) - 1
            if row.logits == "all" or (row.logits == "last" and last):
                logit_rows.append(int(starts[index]) + offset)
    return StepPlan(
        tokens=_int32(token for row in rows for token in row.tokens),
        positions=_int32(positions),
        slots=tuple(map(_int32, slots)),
        query_start=starts,
        context_len=_int32(row.start + len(row.tokens) for row in rows),
        block_tables=tuple(table[:, :widest] for table in tables),
        logit_rows=_int32(logit_rows),
        state_from=_int32(row.state_slots[0] for row in rows) if kept else None,
        state_to=_int32(row.state_slots[1] for row in rows) if kept else None,
        state_after=_each(rows, "after", -1),
        token_types=_each(rows, "types", 0),
        visible_to=_int32(position for row in rows for position in row.seen)
        if any(row.spans for row in rows)
        else None,
    )


def _each(rows: Sequence[Row], name: str, rest: int) -> I32 | None:
    """(T,) numbers that rows give for their first tokens, `rest` for the others; None: none do."""
    given = [(list(getattr(row, name)), len(row.tokens)) for row in rows]
    padded = [[*values, *[rest] * (count - len(values))] for values, count in given]
    return _int32(chain.from_iterable(padded)) if any(values for values, _ in given) else None


def sampling_rows(count: int, **columns: Any) -> SamplingRows:
    """Greedy rows without logprobs; `columns` replaces fields, by one value or one a row."""
    rows = SamplingRows.greedy(count)
    changes: dict[str, Any] = {}
    for name, value in columns.items():
        old = getattr(rows, name)
        if isinstance(old, np.ndarray):
            value = np.ascontiguousarray(np.broadcast_to(np.asarray(value, old.dtype), old.shape))
        changes[name] = value
    assert changes.keys() <= {field.name for field in fields(rows)}, "an unknown column"
    rows = replace(rows, **changes)
    rows.max_logprobs = int(rows.num_logprobs.max(initial=-1))
    rows.all_greedy = bool((rows.temperature == 0).all())
    return rows


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    """Prompt and, where they are known, outputs; a placeholder stands for one in flight."""
    prompt_length: int
    blocks: list[list[int]]
    """The blocks of each cache group; -1 for those that fell out of its window."""
    seed: int
    temperature: float
    state: int | None
    """The slot of its states, where the model keeps some."""
    computed: int = 0


@dataclass(slots=True)
class Driver:
    """Runs prompts to a fixed length, chunked and batched as told. Blocks that fell out of a window
    go to whoever asks next.

    Args:
        chunk: most prompt tokens of one row in a step.
        overlap: launch each step before the ids of the one before are known.
        first_block: blocks are handed out from here on, in a scrambled order.
    """

    model: LoadedModel
    chunk: int = 1 << 20
    overlap: bool = False
    first_block: int = 0
    on_step: Callable[[StepPlan, SamplingRows, StepResult], None] | None = None
    _launched: list[tuple[StepPlan, SamplingRows, StepHandle, list[_Sequence]]] = field(
        default_factory=list
    )
    _free: list[int] = field(default_factory=list)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        seeds: Sequence[int] | None = None,
        temperature: float | Sequence[float] = 0.0,
    ) -> list[list[int]]:
        """`n` ids after each prompt. Raises what the model raises."""
        temperatures = np.broadcast_to(np.asarray(temperature, np.float64), (len(prompts),))
        info = self.model.info
        needed = sum(-(-(len(prompt) + n) // info.block_size) for prompt in prompts)
        end = min(self.first_block + needed * len(info.cache_windows), info.num_kv_blocks)
        order = np.random.default_rng(7).permutation(np.arange(self.first_block, end))
        self._free = order.tolist()
        sequences = [
            _Sequence(
                list(prompt),
                len(prompt),
                [[] for _ in info.cache_windows],
                seeds[i] if seeds else i,
                float(temperatures[i]),
                i if info.num_state_slots else None,
            )
            for i, prompt in enumerate(prompts)
        ]
        while any(self._unfinished(sequence, n) for sequence in sequences):
            self._launch([s for s in sequences if self._unfinished(s, n)])
            if not self.overlap or len(self._launched) == 2:
                self._collect()
        while self._launched:
            self._collect()
        return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]

    @staticmethod
    def _unfinished(sequence: _Sequence, n: int) -> bool:
        return len(sequence.tokens) < sequence.prompt_length + n

    def _launch(self, sequences: list[_Sequence]) -> None:
        rows, sampled = [], []
        for sequence in sequences:
            known = sequence.tokens[sequence.computed :][: self.chunk]
            complete = sequence.computed + len(known) == len(sequence.tokens)
            wanted: Wanted = "last" if complete else "none"
            self._make_room(sequence, len(known))
            rows.append(Row(known, sequence.computed, sequence.blocks, wanted, sequence.state))
            if complete:
                sampled.append(sequence)
        plan = make_plan(rows, self.model.info.block_size)
        columns = sampling_rows(
            len(sampled),
            temperature=[sequence.temperature for sequence in sampled],
            seed=[sequence.seed for sequence in sampled],
            position=[len(sequence.tokens) for sequence in sampled],
        )
        handle = self.model.step(plan, columns)
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.computed += len(row.tokens)
        for index, sequence in enumerate(sampled):
            sequence.tokens.append(-(index + 1))
        self._launched.append((plan, columns, handle, sampled))

    def _make_room(self, sequence: _Sequence, count: int) -> None:
        """Blocks for the next `count` tokens; what their first one no longer sees is given back."""
        info, computed = self.model.info, sequence.computed
        for window, blocks in zip(info.cache_windows, sequence.blocks, strict=True):
            gone = 0 if window is None else max(0, computed - window + 1) // info.block_size
            self._free += [block for block in blocks[:gone] if block >= 0]
            blocks[:gone] = [-1] * gone
            while len(blocks) * info.block_size < computed + count:
                blocks.append(self._free.pop())

    def _collect(self) -> None:
        plan, columns, handle, sampled = self._launched.pop(0)
        result = handle.result()
        for sequence, token in zip(sampled, result.ids.tolist(), strict=True):
            at = next(i for i, value in enumerate(sequence.tokens) if value < 0)
            sequence.tokens[at] = token
        if self.on_step is not None:
            self.on_step(plan, columns, result)


def _int32(values: Iterable[int]) -> I32:
    return np.array(list(values), np.int32)
