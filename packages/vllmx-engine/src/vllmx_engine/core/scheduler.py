"""Decides what each step computes: which sequences decode, prefill how much, or are preempted."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Generator, Iterable

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.images import Images, StepImages
from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.prefix_cache import CacheIdentity, PrefixCache
from vllmx_engine.core.prefixes import Prefixes
from vllmx_engine.core.row_blocks import RowBlocks
from vllmx_engine.core.row_states import RowStates
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.sessions import Sessions
from vllmx_engine.core.speculation import Drafting, Speculator
from vllmx_engine.core.state_slots import SlotPool
from vllmx_engine.core.step_budget import Chunk, PriorityShare, StepBudget
from vllmx_engine.core.step_work import Batch, load_of
from vllmx_engine.core.tiered_prefixes import TieredPrefixes
from vllmx_engine.core.waiting_queue import WaitingSequences

logger = logging.getLogger("vllmx.scheduler")

_MAX_MISFITS = 4
"""The number of misfits of the queue after which a step looks for no other that would fit."""
_MAX_FREED = 256
"""Ended sequences that a step frees, see `Scheduler._dropped`."""
_NO_ROWS = np.zeros(0, np.intp)


class Scheduler:
    """Owns sequences from `add` to `finish`, their rows and their KV blocks.

    One token budget a step: running decodes first (see `PriorityShare` for those of lower
    priority), then unfinished prefills, then the waiting queue. If the queue's head does not fit,
    others of its priority may pass it, at most `max_rows` times; then they wait for it. A
    sequence's prompt gets all its blocks on admission (but see `RowBlocks` for windows), and one
    block at a time is added in each cache group while it decodes; when there is none, the newest
    sequence of the lowest priority gives up all of its own and waits again (recompute). It does so
    too when a sequence of strictly higher priority waits for a row or for blocks. Blocks that are
    given up or freed while a step that reads or writes them is still in flight are safe to hand out
    at once: the device runs steps in order, so their next owner's writes, of a later step, come
    after.
    """

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        *,
        fcfs: bool = False,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        identity: CacheIdentity | None = None,
        images: Images | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._images = images
        self.limits, self.cost = limits, cost
        self.cache = PrefixCache(identity, limits.windows)
        self.pool = BlockPool(limits.num_blocks, self.cache)
        self.table = RowTable.of(limits)
        slots = SlotPool(limits.num_state_slots) if limits.num_state_slots else None
        self.prefixes = Prefixes(self.table, self.pool, self.cache, slots, enabled=prefix_caching)
        self.blocks = RowBlocks(limits, self.table, self.pool, self.prefixes)
        self.states: RowStates | None = None
        """Set where the model has recurrent layers."""
        if slots is not None:
            self.states = RowStates(limits, self.table, slots, keep_snapshots=prefix_caching)
            self.cache.forgotten = slots.forget
        self.tiers: TieredPrefixes | None = None
        self.sessions: Sessions | None = None
        """Both are set by the owner, where blocks outlive eviction or sessions pin them."""
        self.speculator: Speculator | None = None
        """Set where the model can verify drafts."""
        if not limits.pools and (slots is None or limits.keeps_states_after):
            self.speculator = Speculator(self.table, cost, limits.vocab_size, drafting)
        self.live: dict[str, Sequence] = {}
        """All sequences between `add` and `finish`, by request id."""
        self.running: list[Sequence] = []
        self.prefills: list[Sequence] = []
        """Sequences of `running` whose known tokens are not all scheduled, best first."""
        self._waiting = WaitingSequences(
            cost, fcfs=fcfs, shared_from=limits.block_size + 1 if prefix_caching else None
        )
        self.queue, self.share = self._waiting.queue, self._waiting.share
        self._dropped: list[Sequence] = []
        """Ended ones of `finish_all`, while others run: freeing an object takes a microsecond."""
        self.failed: list[tuple[Sequence, Exception]] = []
        """Sequences whose own bookkeeping raised; the owner takes them out and ends them."""
        self.num_preemptions = self.num_queried_tokens = self.num_hit_tokens = 0
        self._least_chunk = cost.min_chunk if chunked_prefill else limits.max_tokens
        """The least chunk of a prefill that is not the first of its step; shorter ones wait.
        Without chunked prefill only a prompt that is too long for its step is ever cut."""
        self._priority_share = PriorityShare(self.table, cost)

    # --- the life of a sequence -------------------------------------------------------------------
    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, *, hold: bool = False) -> None:
        """Takes a checked sequence in; with `hold` it waits for `release`, its place in the queue
        by its arrival."""
        sequence.begin_at(self.cache.root(sequence.request.cache_salt, sequence.adapter_digest))
        self.live[sequence.request_id] = sequence
        if self.speculator is not None:
            self.speculator.add(sequence)
        if self.tiers is not None and not sequence.request.leader:
            hold |= self.tiers.start(sequence)
        self._waiting.enter(sequence, hold=hold)

    def release(self, sequence: Sequence) -> None:
        """Resumes a sequence that was held or that sat out steps."""
        if sequence.row < 0:
            if self.tiers is None or self.tiers.is_ready(sequence):
                self._waiting.release(sequence)
        elif sequence not in self.prefills:
            self.table.start_decoding(sequence)

    def release_followers(self, sequence: Sequence) -> None:
        """Resumes sequences that wait for the prompt of `sequence`: its blocks are in the prefix
        cache, or never will be."""
        self._waiting.release_followers([sequence])

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Ends a sequence in whatever state it is; its blocks are free from here on. `forget`:
        they are not to be found as prefixes."""
        self._end(sequence)
        if sequence.row >= 0:
            if sequence.request.session_id and self.sessions is not None and not forget:
                self.sessions.keep(sequence.request, self.table.owned(sequence.row).tolist())
            self._leave_row(sequence, forget=forget)
        else:
            self._waiting.take_out(sequence)
        self._waiting.leave([sequence])

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self.live[sequence.request_id]
        if self.speculator is not None:
            self.speculator.finish(sequence)

    def finish_all(self, sequences: Iterable[Sequence]) -> None:
        """`finish` for each, at a fraction of its cost for those that wait in the queue."""
        queued, elsewhere = self._waiting.part(sequences)
        for sequence in elsewhere:
            self.finish(sequence)
        for sequence in queued:
            self._end(sequence)
        self.queue.remove_all(queued)
        self._waiting.leave(queued)
        if self.running:
            self._dropped += queued

    def make_room(self, rows: AnyArray, num_tokens: AnyArray) -> AnyArray:
        """Gives decoding rows blocks to hold so many tokens. (R,) False where they are scarce."""
        room = self.blocks.room(len(self.running), self.prefills)
        return self.blocks.extend(rows, num_tokens, room)

    def feed_known(self, sequence: Sequence, number: int) -> None:
        """A sequence that decodes has known tokens, behind the one that step `number` brought: they
        are computed as a prompt is. What a later step under way brings of it is skipped."""
        if sequence.row < 0:
            return
        row = sequence.row
        if self.table.sampled_in[row] > number:
            sequence.skipped_step = int(self.table.sampled_in[row])
        self.table.feed_known(row)
        insort(self.prefills, sequence, key=self.queue.order)

    # --- one step ---------------------------------------------------------------------------------
    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can be computed before a result comes in."""
        del self._dropped[-_MAX_FREED:]
        decodes, victim = self._decodes()
        context = int(self.table.computed[decodes].sum()) + decodes.size if decodes.size else 0
        drafts = self._drafts(decodes, context)
        num_decoded = decodes.size + (0 if drafts is None else drafts.num_tokens)
        chunks: list[Chunk] = []
        images: StepImages | None = None
        if self.prefills or self.queue:  # a step of decodes alone plans no prompts
            if self._images is not None:
                images = self._images.for_step(self.cost, self.running)
            chunks = self._chunks((num_decoded, context), victim, images)
        if not decodes.size and not chunks:
            return None
        load = load_of(num_decoded, context, chunks, images)
        batch = Batch(decodes, tuple(chunks), load, images, drafts)
        self._waiting.charge(batch, self.table)
        return batch

    def _drafts(self, decodes: AnyArray, context: int) -> Drafts | None:
        """Drafts for decodes, as far as tokens, logit rows and blocks go."""
        if self.speculator is None or not self.speculator.is_on or not decodes.size:
            return None
        room = min(self.limits.token_budget, self.limits.max_logit_rows) - decodes.size
        if self.prefills or self.queue:
            least = [one.least_chunk(self.table.computed.item(one.row)) for one in self.prefills]
            room = min(room // 2, room - max(least, default=0))
        drafts = self.speculator.drafts(decodes, context, room)
        if drafts is None:
            return None
        if not self.make_room(drafts.rows, drafts.lengths + drafts.counts).all():
            held = self.table.num_blocks[drafts.rows] * self.limits.block_size
            drafts.cut(np.maximum(held - drafts.lengths, 0))
        drafts = self.speculator.filled(drafts.without_empty())
        if self.states is not None:
            self.states.reserve(drafts, min(len(self.queue), self.table.num_free))
            drafts = drafts.without_empty()
        return drafts if drafts.sequences else None

    def _chunks(
        self, decodes: tuple[int, int], victim: Sequence | None, images: StepImages | None
    ) -> list[Chunk]:
        """Returns chunks of prompts for a step with `decodes` (rows, context tokens); `victim` is
        the last preempted sequence."""
        share, num_prompts = self._priority_share, self._num_prompts
        budget = StepBudget(self.limits, self.cost, share, decodes, self._least_chunk, num_prompts)
        chunks: list[Chunk] = []
        prefilling = self._prefilling(victim)
        for sequence in prefilling:
            start = self.table.computed.item(sequence.row)
            size = budget.fit(sequence, start, self.queue.asked(sequence))
            if not size:  # the step is full, and no later prompt may overtake this one
                break
            if images is not None:
                size = images.reach(sequence, start, size, budget)
            if size:
                least = sequence.least_chunk(start)
                size = self.blocks.cover(sequence.row, start, size, len(self.running), least)
            if sequence.images is not None:
                size = sequence.images.whole(start, size)
            if not size:  # it waits for blocks or features: others may still fit
                continue
            if self.states is not None:
                size = self.states.cut(sequence, start, size)
            chunk = self._cut(sequence, start, size)
            chunks.append(chunk)
            budget.take(chunk)
            if budget.is_spent:
                break
        prefilling.close()  # sequences set aside return to the queue now, not with the next gc
        return chunks

    def _num_prompts(self) -> float:
        """The prompts that may join the step now, begun or waiting, in lengths of the longest."""
        holds, computed = self._priority_share.holds_back, self.table.computed
        begun = [one for one in self.prefills if not holds(self.queue.asked(one))]
        left = [len(one.tokens) - computed.item(one.row) for one in begun]
        if (head := self.queue.first()) is not None and not holds(self.queue.asked(head)):
            free = self.table.num_free - self._reserved(head)[0]
            left += [len(head.tokens)] * min(len(self.queue), free)  # none if that is negative
        return sum(left) / max(left) if left else 1.0

    def _ready(self) -> AnyArray:
        """Rows that may decode a token now."""
        has_prompts = bool(self.prefills or (self.queue and self.table.num_free))
        return self._priority_share.choose(
            self.table.ready(), self._waiting.ranks, has_prompts=has_prompts
        )

    def _decodes(self) -> tuple[AnyArray, Sequence | None]:
        """Ready rows, each with blocks for its next token, and the last one of those that had to
        be preempted for them, for an unfinished prefill or for a waiting one."""
        victim: Sequence | None = None
        if not self.running:
            rows = self._priority_share.choose(_NO_ROWS, self._waiting.ranks, has_prompts=True)
            return rows, victim
        while True:
            rows = self._ready()
            full = self.blocks.full_rows(rows)
            wanted = self.blocks.num_groups * full.size + self.blocks.stuck(self.prefills)
            is_short = wanted > self.pool.num_available
            if not is_short and not self._must_yield(wanted):
                break
            if is_short:  # what no window sees goes, though the prefix cache might have had it
                running = np.array([sequence.row for sequence in self.running], np.intp)
                if self.blocks.slide(running, keep_unfiled=False):
                    continue
            # Each preemption frees blocks and may take a ready row away: look again after it.
            victim = max(self.running, key=self.queue.order)
            self._preempt(victim)
        self.blocks.grow(full)  # last: a preempted row would give its new block straight back
        return rows, victim

    def _must_yield(self, num_taken: int) -> bool:
        """True if the queue's head outranks running sequences, does not fit next to them and the
        `num_taken` blocks that decodes get, and would fit in their place."""
        head = self.queue.first() if len(self._waiting.ranks) > 1 else None
        if head is None:
            return False
        lower = [sequence.row for sequence in self.running if self.queue.outranks(head, sequence)]
        reserved_rows, reserved_blocks = self._reserved(head)
        if not lower:
            return False
        if self.table.num_free <= reserved_rows:
            return self.table.num_free + len(lower) > reserved_rows
        try:
            wanted = self.blocks.wanted(head, self.prefixes.look(head)) + num_taken
        except Exception:  # its admission will meet it again, and end it
            return False
        missing = wanted + reserved_blocks - self.blocks.room(len(self.running), self.prefills)
        held = self.table.num_owned(lower)
        return 0 < missing <= held + self.blocks.num_groups * len(lower)

    def _prefilling(self, victim: Sequence | None) -> Generator[Sequence]:
        """Unfinished prefills, then, as far as rows and blocks go, the waiting queue; but one that
        waits with a higher priority than an unfinished prefill goes before it. In a step that
        preempts, only those that outrank the victims are admitted."""
        prefills = deque(self.prefills)
        aside: list[Sequence] = []
        """The sequences that do not fit, out of the queue until this is closed."""
        try:
            while True:
                head = self._next_to_admit(victim, aside)
                if prefills and (head is None or not self.queue.outranks(head, prefills[0])):
                    yield prefills.popleft()
                elif head is None:
                    return
                elif self._try_admit(head):
                    for sequence in aside:
                        sequence.num_passed += 1
                    yield head
                elif not self.failed:
                    self.queue.remove(head)
                    aside.append(head)
        finally:
            for sequence in aside:
                self.queue.push(sequence)

    def _next_to_admit(self, victim: Sequence | None, aside: list[Sequence]) -> Sequence | None:
        """The next one of the queue, unless it would pass by one of `aside` that must not be."""
        if not self.table.num_free or self.failed or len(aside) == _MAX_MISFITS:
            return None
        head = self.queue.first()
        if head is None or self.table.num_free <= self._reserved(head)[0]:
            return None  # those behind it may not take reserved rows either
        if victim is not None and not self.queue.outranks(head, victim):
            return None
        return None if any(self._holds_back(misfit, head) for misfit in aside) else head

    def _reserved(self, sequence: Sequence) -> tuple[int, int]:
        """The rows and blocks that a waiting sequence must leave to better priorities. One that was
        given a turn among these may take them, as they wait for it."""
        limits, may_all = self.limits, not self.running or self.queue.priority(sequence) < 0
        return (0, 0) if may_all else (limits.reserved_rows, limits.reserved_blocks)

    def _holds_back(self, misfit: Sequence, other: Sequence) -> bool:
        """True if `other` must not pass a sequence that does not fit. A preempted one already gave
        up its blocks to older ones."""
        if misfit.was_preempted or self.queue.outranks(misfit, other):
            return True
        return misfit.num_passed >= self.limits.max_rows

    def _try_admit(self, sequence: Sequence) -> bool:
        try:
            return self._admit(sequence)
        except Exception as error:  # one request's fault must not stop the others
            self.failed.append((sequence, error))
            return False

    def _cut(self, sequence: Sequence, start: int, size: int) -> Chunk:
        """A chunk of a prefilling sequence, which moves on to decoding when it is the last one."""
        end = start + size
        samples = end == len(sequence.tokens)
        num_logits = size if self.limits.token_vectors else int(samples)
        if not sequence.all_scored:
            num_logits = max(0, end - max(start, sequence.num_scored))
            sequence.num_scored = max(end, sequence.num_scored)
        if samples:
            self.prefills.remove(sequence)
            self.table.start_decoding(sequence)
        return Chunk(sequence, start, size, num_logits, samples)

    # --- rows and blocks --------------------------------------------------------------------------
    def _admit(self, sequence: Sequence) -> bool:
        """Gives the sequence a row, the cached blocks of its prefix and new ones for the rest of
        its known tokens, and leaves one more block in each group for each running row."""
        hit = self.prefixes.look(sequence)
        room = self.blocks.room(len(self.running), self.prefills) - self._reserved(sequence)[1]
        has_slots = self.states is None or self.states.has_room
        is_short = self.blocks.wanted(sequence, hit) > room or not has_slots
        if is_short or self.table.must_wait(sequence):
            return False
        if self.tiers is not None and self.tiers.land(sequence, hit):
            hit = self.prefixes.look(sequence)
            if self.blocks.wanted(sequence, hit) > room:
                return False
        self.queue.admit(sequence)
        sequence.found = None
        self.running.append(sequence)
        insort(self.prefills, sequence, key=self.queue.order)
        client = self._waiting.charge_prompt(sequence, hit.num_blocks * self.limits.block_size)
        self.blocks.admit(sequence, client, hit)
        self.table.rank[sequence.row] = self.queue.asked(sequence)
        if self.speculator is not None:
            self.speculator.admit(sequence)
        if self.states is not None:
            self.states.admit(sequence, hit, has_followers=self._waiting.has_followers(sequence))
        if not sequence.was_preempted:
            sequence.queue_s = time.monotonic() - sequence.arrival_s
            sequence.num_cached_tokens = hit.num_blocks * self.limits.block_size
            self.num_queried_tokens += sequence.num_prompt if self.prefixes.enabled else 0
            self.num_hit_tokens += sequence.num_cached_tokens
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; what it generated stays, and a result on its way still counts."""
        logger.debug("preempting %s at %d tokens", sequence.request.shown, len(sequence.tokens))
        computed = int(self.table.computed[sequence.row])
        sequence.num_charged = max(sequence.num_charged, computed)
        self._leave_row(sequence)
        sequence.was_preempted = True
        self.num_preemptions += 1
        self.queue.push(sequence)

    def _leave_row(self, sequence: Sequence, *, forget: bool = False) -> None:
        self.running.remove(sequence)
        if not self.running:
            self._dropped.clear()
        if sequence in self.prefills:
            self.prefills.remove(sequence)
        if self.states is not None:
            self.states.leave(sequence, forget=forget)
        self.blocks.leave(sequence, forget=forget)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while sequences run."""
        if self.running:
            return False
        self.pool.clear_idle()
        if self.states is not None:
            self.states.pool.clear()
        if self.tiers is not None:
            self.tiers.tiers.clear()
        return True
