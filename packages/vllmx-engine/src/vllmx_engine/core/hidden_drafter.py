"""A drafter that reads the hidden states of its target: heads of a checkpoint, EAGLE.

The target's steps keep hidden states in a store on the device (`vllmx_core.model.TapSpec`). The
drafter computes the same tokens with them, each with the id that follows it, so that its keys and
values lie in blocks of the same numbers as the target's and are shared, freed and found with them.
It drafts behind the last of these tokens, by feeding its own hidden states and ids back. One that
reads its target's keys and values (`DraftSpec.reads_pages`) only does the latter.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from vllmx_core.backend import LoadedModel, StepHandle
from vllmx_core.model import DraftSpec
from vllmx_core.plan import I32, AnyArray, SamplingRows, StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.draft_model import DraftModel, Handles
from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.rows import RowTable, known_tokens
from vllmx_engine.core.sequence import Sequence

if TYPE_CHECKING:
    from vllmx_engine.core.batch import Step

logger = logging.getLogger("vllmx.draft")

KEPT_STEPS = 3
"""Steps whose hidden states are kept: one is read while two are in flight."""


class Seen(MutableRecord):
    """A step of the target, whose hidden states are kept."""

    number: int
    rows: AnyArray  # (R,)
    epochs: AnyArray  # (R,)
    plan: StepPlan
    """The drafter's step over the same tokens, but for ids that the target's step draws."""
    drawn_behind: I32
    """(L,) the tokens behind which it draws ids."""
    is_collected: bool = False


class HiddenDrafter(DraftModel):
    """See the module's docstring, and `DraftModel`.

    Args:
        own_rows: see `vllmx_core.model.TapSpec`.
        step_tokens: the greatest T that the store has rows for, three times.
    """

    def __init__(
        self,
        model: LoadedModel,
        table: RowTable,
        group: int,
        num_ids: int,
        max_model_len: int,
        *,
        own_rows: int,
        step_tokens: int,
        spec: DraftSpec,
    ) -> None:
        super().__init__(model, table, group, num_ids, max_model_len, shares_pages=True)
        self._spec = spec
        self._step_tokens = step_tokens
        self._own_rows: I32 = np.arange(own_rows, dtype=np.int32)
        """A row for each draft."""
        self._seen: deque[Seen] = deque()
        self._running: deque[tuple[int, StepHandle]] = deque()
        """Steps without drafts that nobody has waited for, by the number of the target's."""

    def verified(self, sequences: list[Sequence]) -> None:
        """See `DraftsByModel`: the next step computes what was kept."""

    # --- the target's steps -----------------------------------------------------------------------
    def keep(self, plan: StepPlan, step: Step) -> None:
        """Makes a step of the target keep its hidden states, before it is launched; computes those
        of the steps before, whose ids are known."""
        if self.has_failed or plan.num_tokens > self._step_tokens:
            return
        self._catch_up()
        self._wait(step.number - KEPT_STEPS)
        first = step.number % KEPT_STEPS * self._step_tokens
        rows = first + np.arange(plan.num_tokens, dtype=np.int32)
        plan.tap_rows = rows
        tokens = np.zeros(plan.num_tokens, np.int32)
        tokens[:-1] = plan.tokens[1:]
        tails = plan.query_start[1:] - 1
        for chunk, tail in zip(step.batch.chunks[::-1], tails[::-1].tolist(), strict=False):
            end = chunk.start + chunk.num_tokens
            if not chunk.num_logits:  # the prompt goes on
                tokens[tail] = known_tokens(chunk.sequence, end, end + 1)[0]
        turns = plan.rope_positions
        groups = len(self._model.info.cache_windows)
        own = StepPlan(
            tokens=tokens,
            positions=plan.positions.copy(),
            slots=(plan.slots[self._group].copy(),) * groups,
            query_start=plan.query_start.copy(),
            context_len=plan.context_len.copy(),
            block_tables=(np.array(plan.block_tables[self._group], order="C"),) * groups,
            logit_rows=np.zeros(0, np.int32),
            rope_positions=None if turns is None else turns.copy(),
            feature_rows=rows,
        )
        context, drawn = self._context(own), plan.logit_rows.copy()
        self._seen.append(Seen(step.number, step.rows, step.epochs, context, drawn))

    def _context(self, plan: StepPlan) -> StepPlan:
        """The drafter's step over tokens of its target."""
        return plan

    def collected(self, number: int, ids: I32) -> None:
        """Takes in the ids that a step of the target drew."""
        while self._seen and self._seen[0].number < number and not self._seen[0].is_collected:
            self._seen.popleft()  # it failed
        for seen in self._seen:
            if seen.number == number:
                seen.plan.tokens[seen.drawn_behind] = np.maximum(ids, 0)
                seen.is_collected = True

    def _catch_up(self) -> None:
        """Enqueues the steps that were collected, without drafts."""
        try:
            for seen in self._collected():
                self._compute(seen)
        except Exception:  # whatever a backend raises: the target goes on without
            self._log_failure()
            self._drain([handle for _, handle in self._running])
            self._running.clear()

    def _compute(self, seen: Seen) -> None:
        if self._spec.reads_pages:  # there is nothing to compute
            return
        while len(self._running) > 1:
            self._wait(self._running[0][0])
        handle = self._model.step(seen.plan, SamplingRows.greedy(0))
        self._running.append((seen.number, handle))

    def _collected(self) -> list[Seen]:
        found = []
        while self._seen and self._seen[0].is_collected:
            found.append(self._seen.popleft())
        return found

    def _wait(self, number: int) -> None:
        """Waits for the steps up to that of the target's step `number`."""
        while self._running and self._running[0][0] <= number:
            self._running.popleft()[1].result()

    # --- drafts -----------------------------------------------------------------------------------
    def _fill(self, drafts: Drafts, handles: Handles) -> None:
        *earlier, last = [None, *self._collected()]
        for seen in earlier:
            if seen is not None:
                self._compute(seen)
        if self._running:
            self._wait(self._running[-1][0])
        longest = np.argsort(-drafts.counts, kind="stable")
        active = longest[:0]
        if last is not None:
            places = self._places(last, drafts)
            active = longest[places[longest] >= 0][: self._own_rows.size]
            own = drafts.part(active)
            if active.size:
                self._draft(last, own, places[active], handles)
            else:
                self._compute(last)
        drafts.counts[:] = 0
        if active.size:
            self._cut_unknown(own)
            drafts.put_back(active, own)

    def _draft(self, seen: Seen, drafts: Drafts, places: AnyArray, handles: Handles) -> None:
        """Drafts behind the tokens `places` of a step, the longest drafts first."""
        rows, lengths = drafts.rows, drafts.lengths
        own = self._own_rows[: rows.size]
        order = np.argsort(places)  # in which the first step draws
        plan, ahead = seen.plan, np.int32(1)
        if self._spec.reads_pages:
            order, ahead = np.arange(rows.size), np.int32(0)
            plan = self._next_plan(rows, lengths - np.int32(2))
            plan.tokens = seen.plan.tokens[places]
            assert seen.plan.feature_rows is not None, "the target keeps all hidden states"
            plan.feature_rows, plan.tap_rows = seen.plan.feature_rows[places], own
        else:
            plan.logit_rows = places[order].astype(np.int32)
            plan.tap_rows = np.full(plan.num_tokens, -1, np.int32)
            plan.tap_rows[places] = own
        handle = self._model.step(plan, self._sampling(rows[order], lengths[order]))
        handles.append((handle, order, 0))
        drawn_by = -1 - np.argsort(order).astype(np.int32)
        for place in range(1, int(drafts.counts[0])):
            count = int((drafts.counts > place).sum())
            plan = self._next_plan(rows[:count], lengths[:count] - np.int32(2) + ahead * place)
            plan.tokens = drawn_by[:count].copy()
            plan.own_rows = plan.tap_rows = own[:count]
            table = self._table
            if table.num_turned:
                turned = plan.positions + table.turn[rows[:count]]
                plan.rope_positions = np.repeat(turned[None], table.turn_axes, axis=0)
            drawn_by = -1 - np.arange(count, dtype=np.int32)
            sampling = self._sampling(rows[:count], lengths[:count] + np.int32(place))
            handles.append((self._model.step(plan, sampling), slice(count), place))
            self._take(handles, drafts)
        while handles:
            self._take(handles, drafts)

    def _places(self, seen: Seen, drafts: Drafts) -> AnyArray:
        """(D,) the last token of each draft's sequence whose hidden states a step has; -1 for rows
        that sat it out."""
        numbers = np.full(self._table.epoch.size, -1)
        numbers[seen.rows] = np.arange(seen.rows.size)
        number = numbers[drafts.rows]
        begin, end = seen.plan.query_start[number], seen.plan.query_start[number + 1]
        place = begin + drafts.lengths - 2 - seen.plan.positions[begin]
        is_here = (number >= 0) & (seen.epochs[number] == self._table.epoch[drafts.rows])
        return np.where(is_here & (begin <= place) & (place < end), place, -1)
