"""The state slots of running sequences, and where they leave snapshots.

A row writes one slot. It leaves that slot behind as a snapshot by going on in another one: its next
step reads the old slot and writes the new one. Snapshots are taken at ends of blocks alone, because
a prefix is found by whole blocks:

- where a look-up found blocks without states behind them, as behind a shared system prompt on its
  second use, and behind the last whole block of a prompt. Chunks end there.
- at every end of a block that a row passes else, while it decodes and between chunks. Each such
  snapshot takes the place of the one before, so that of an ended, aborted or preempted sequence
  the last one is left, which lies less than a block behind its last token.

Rows come first: where no slot can be had, a row goes on in its own and no snapshot is taken.

A step whose last token may be taken back reads one slot and writes another one, too, so that the
states before it are still there. A step that verifies a draft keeps the states before it and those
behind each of its tokens, until it is known how many hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from vllmx_core.plan import I32, AnyArray, StepPlan
from vllmx_core.records import MutableRecord, field

from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.prefixes import Hit
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.state_slots import SlotPool, Snapshot

_WORTH_A_STEP = 64
"""A prompt is cut in two steps for a snapshot that saves at least so many tokens."""


class _Marks(MutableRecord):
    """The positions of a row's snapshots."""

    due: list[int] = field(default_factory=list)
    """Positions at which one is due, ascending: chunks end there."""
    last_kept: int = 0
    """The end of the last snapshot that stays: the one that the row began with, or one that was
    due."""
    passing: Snapshot | None = None
    """The last one, if the next takes its place."""


class RowStates:
    """Takes slots out of the pool for the rows of a table, and gives them back."""

    def __init__(
        self, limits: Limits, table: RowTable, pool: SlotPool, *, keep_snapshots: bool
    ) -> None:
        self.pool = pool
        self._table = table
        self._size = limits.block_size
        self._keep = keep_snapshots
        self._far = limits.snapshot_tokens
        self._least = min(limits.snapshot_tokens, _WORTH_A_STEP)
        rows = limits.max_rows
        self._from = np.full(rows, -1, np.int32)
        """The slots where the states of each row lie; -1 before its first step, when it begins with
        none."""
        self._to = np.full(rows, -1, np.int32)
        """The slots where its next step leaves them."""
        self._pending = np.full((limits.num_in_flight, rows), -1, np.int32)
        """Slots left behind by the steps under way, in turn: they are filed when the step comes
        back."""
        self._marks = [_Marks() for _ in range(rows)]
        self._before: dict[int, int] = {}
        """The slots of rows before the step that was planned last, while it may be taken back."""
        self._drafted: dict[int, list[int]] = {}
        """The slots of rows with a draft before their step and behind each of its tokens but the
        last, until `resume`."""

    @property
    def num_used(self) -> int:
        """Slots that rows write."""
        return int(np.count_nonzero(self._to >= 0))

    # --- rows -------------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """True if `admit` can be called. False only until rows admitted before have read the
        snapshots that they begin with, and drafts were verified."""
        return self.pool.num_available > 0

    def admit(self, sequence: Sequence, hit: Hit, *, has_followers: bool) -> None:
        """Gives a row its slot. It begins with the snapshot of a hit, which it leaves as it is; but
        where that is the last slot that can be had, it writes into it."""
        row, snapshot = sequence.row, hit.snapshot
        if snapshot is not None:
            snapshot.num_hits += 1
            self.pool.acquire(snapshot.slot)
        slot = self.pool.take(any_snapshot=True)
        if slot < 0:
            assert snapshot is not None, "admitted without room"
            self.pool.forget(snapshot.entry[0])
            slot = snapshot.slot
        self._to[row] = slot
        self._from[row] = -1 if snapshot is None else snapshot.slot
        self._marks[row] = _Marks(last_kept=hit.num_blocks * self._size)
        if self._keep:
            self._set_due(sequence, hit, self._size if has_followers else self._least)

    def _set_due(self, sequence: Sequence, hit: Hit, least: int) -> None:
        last = (len(sequence.tokens) - 1) // self._size  # the last token is always computed
        start = hit.num_blocks * self._size
        for position in (hit.num_found * self._size, last * self._size):
            if position - start >= least:
                self._marks[sequence.row].due.append(position)
                start = position

    def leave(self, sequence: Sequence, *, forget: bool) -> None:
        """Takes a row's slots back before the row itself goes. What its steps under way were to
        leave behind is never filed. `forget`: no snapshot that it made is to be found."""
        row = sequence.row
        for slot in self._used_by(row):
            self.pool.release(slot)
        self._from[row] = self._to[row] = self._pending[:, row] = -1
        self._before.pop(row, None)
        self._drafted.pop(row, None)
        if forget:
            for digest in sequence.digests[sequence.num_cached_tokens // self._size :]:
                self.pool.forget(digest)

    def _used_by(self, row: int) -> list[int]:
        """The slots of a row, each as often as it uses it."""
        source, target = int(self._from[row]), int(self._to[row])
        slots = [target, -1 if source == target else source, *self._pending[:, row].tolist()]
        slots += [self._before.get(row, -1), *self._drafted.get(row, [])]
        return [slot for slot in slots if slot >= 0]

    # --- a step -----------------------------------------------------------------------------------
    def cut(self, sequence: Sequence, start: int, size: int) -> int:
        """Returns the size of a chunk of at most `size` tokens that ends where a snapshot is due.
        Any chunk but the last ends with a block, where a snapshot can be taken."""
        if not self._keep:
            return size
        end = start + size
        for position in self._marks[sequence.row].due:
            if start < position < end:
                return position - start
        whole = end // self._size * self._size
        return whole - start if end < len(sequence.tokens) and whole > start else size

    def reserve(self, drafts: Drafts, num_spared: int) -> None:
        """Takes slots for the states behind each token of drafts, which are cut to the slots that
        there are; `num_spared` of them are left."""
        wanted = zip(drafts.rows.tolist(), drafts.counts.tolist(), strict=True)
        for number, (row, count) in enumerate(wanted):
            source = int(self._from[row])
            own = [int(self._to[row])] if self._to[row] != source else []
            slots = own + self._take_some(count + 1 - len(own), num_spared)
            drafts.counts[number] = max(0, len(slots) - 1)
            if slots:
                self._to[row] = slots.pop()
            if drafts.counts[number]:
                self.pool.acquire(source)
                self._drafted[row] = [source, *slots]

    def _take_some(self, count: int, num_spared: int) -> list[int]:
        found: list[int] = []
        while len(found) < count and self.pool.num_available > num_spared:
            slot = self.pool.take(any_snapshot=False)
            if slot < 0:
                break
            found.append(slot)
        return found

    def resume(self, sequence: Sequence, num_new: int) -> None:
        """The states of a row with a draft are those behind the first `num_new` tokens of its step;
        those behind the last full block become a snapshot."""
        row, own = sequence.row, int(self._to[sequence.row])
        slots = [*self._drafted.pop(row), own]
        self._from[row] = slots[num_new]
        blocks, behind = divmod(int(self._table.computed[row]), self._size)
        full = num_new - behind
        is_new = self._keep and full > 0 and self._table.num_cached[row] == blocks
        if is_new and (slots[full] != own or self._leave_behind(row, blocks * self._size) >= 0):
            self._file(sequence, slots[full], blocks)
        for place, slot in enumerate(slots[:-1]):
            if place != num_new:
                self.pool.release(slot)

    def plan(
        self,
        rows: AnyArray,
        plan: StepPlan,
        number: int,
        unsure: Iterable[int] = (),
        drafts: Drafts | None = None,
    ) -> None:
        """Sets the slots of step `number`; the rows are then what they are after it. Those `unsure`
        may be taken back until `settle`, as far as slots go; those with `drafts`, for which slots
        were reserved, wait for `resume`."""
        for row in unsure:
            self._preserve(row)
        source: I32 = self._from[rows]
        target: I32 = self._to[rows]
        for slot in source[source != target].tolist():
            if slot >= 0:
                self.pool.release(slot)  # to a later step, which runs after this one
        self._from[rows] = target
        plan.state_from, plan.state_to = source, target
        ends = (plan.context_len & (self._size - 1)) == 0
        if drafts is not None:
            plan.state_after = after = np.full(plan.num_tokens, -1, np.int32)
            starts = plan.query_start[drafts.index].tolist()
            for row, start in zip(drafts.rows.tolist(), starts, strict=True):
                slots = self._drafted[row][1:]
                after[start : start + len(slots)] = slots
            ends[drafts.index] = False
        if self._keep:
            for index in np.flatnonzero(ends).tolist():
                row = int(rows[index])
                left = self._leave_behind(row, int(plan.context_len[index]))
                if left >= 0:
                    self.pool.acquire(left)
                    self._pending[number % len(self._pending), row] = left

    def _preserve(self, row: int) -> None:
        """The next step leaves the slot alone that the states of a row lie in."""
        source = int(self._from[row])
        if source < 0:
            return
        if source == self._to[row]:
            target = self.pool.take(any_snapshot=False)
            if target < 0:
                return
            self._to[row] = target
        self.pool.acquire(source)
        self._before[row] = source

    def can_take_back(self, row: int) -> bool:
        """True if `take_back` can be called."""
        return row in self._before

    def take_back(self, row: int, number: int) -> None:
        """The states of a row are again what they were before step `number`, the last one that was
        planned."""
        pending = self._pending[number % len(self._pending)]
        if pending[row] >= 0:
            self.pool.release(int(pending[row]))
            pending[row] = -1
        written = int(self._from[row])
        if written != self._to[row]:
            self.pool.release(written)
        self._from[row] = self._before.pop(row)

    def settle(self) -> None:
        """Nothing of the step that was planned last is taken back any more."""
        for slot in self._before.values():
            self.pool.release(slot)
        self._before.clear()

    def _leave_behind(self, row: int, end: int) -> int:
        """The slot that holds a row's states behind its first `end` tokens: the row goes on in
        another one. -1 where there is none."""
        slot = self.pool.take(any_snapshot=self._is_far(row, end))
        if slot < 0:
            return -1
        left, self._to[row] = int(self._to[row]), slot
        return left

    def _is_far(self, row: int, end: int) -> bool:
        return end - self._marks[row].last_kept >= self._far

    def file(self, number: int, rows: AnyArray, epochs: AnyArray, context_len: I32) -> None:
        """Step `number` came back sound, and full blocks of its rows were filed: so are the slots
        that they left behind in it."""
        pending = self._pending[number % len(self._pending)]
        for index in np.flatnonzero(pending[rows] >= 0).tolist():
            row, blocks = int(rows[index]), int(context_len[index]) // self._size
            sequence = self._table.owner[row]
            if sequence is None or self._table.epoch[row] != epochs[index]:
                continue
            slot, pending[row] = int(pending[row]), -1
            if self._table.num_cached[row] == blocks:
                self._file(sequence, slot, blocks)
            self.pool.release(slot)

    def _file(self, sequence: Sequence, slot: int, blocks: int) -> None:
        marks, end = self._marks[sequence.row], blocks * self._size
        snapshot = self.pool.file(
            slot, sequence.entry_of(blocks - 1, self._size), is_far=self._is_far(sequence.row, end)
        )
        passed, marks.passing = marks.passing, snapshot
        if end in marks.due:
            marks.last_kept, marks.passing = end, None
        if passed is not None and not passed.num_hits:
            self.pool.forget_snapshot(passed)

    def check(self) -> None:
        """Asserts that each slot is somebody's, as often as rows say, and written by one alone."""
        rows = [row for row, owner in enumerate(self._table.owner) if owner is not None]
        self.pool.check([slot for row in rows for slot in self._used_by(row)])
        written = self._to[rows].tolist()
        assert -1 not in written, "a row without a slot"
        assert len(set(written)) == len(written) == self.num_used, "rows write one slot"
        assert not any(map(self.pool.holds_snapshot, written)), "a snapshot is written"
        read = [*self._from[rows].tolist(), *self._pending[:, rows].ravel().tolist()]
        read += [slot for slots in self._drafted.values() for slot in slots]
        for row, slot in zip(rows, written, strict=True):
            others = read.count(slot) - (self._from[row] == slot)
            assert not others, "a slot is written that another row reads, or that is to be filed"
