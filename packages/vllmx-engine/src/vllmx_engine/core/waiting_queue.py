"""Live sequences without a row: queued, waiting for a shared prompt, or held; their deadlines."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from vllmx_core.errors import QueueTimeoutError

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.fair_queue import FairShare, WaitingQueue
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.step_work import Batch


class Followers:
    """Sequences by the one whose prompt they wait for, their leader."""

    def __init__(self) -> None:
        self._leaders: dict[str, Sequence] = {}
        """Live sequences that others may name as their leader, while their prompt is computed."""
        self._waiting: dict[str, dict[str, Sequence]] = {}
        """The sequences that wait, by their leader's id, then by their own."""

    def __len__(self) -> int:
        """The number of sequences that wait."""
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        """True if it waits for another's prompt."""
        leader = sequence.request.leader
        return leader is not None and sequence.request_id in self._waiting.get(leader, ())

    def wait_for(self, leader: Sequence) -> bool:
        """True if a sequence waits for this one's prompt."""
        return leader.request_id in self._waiting

    def may_lead(self, sequence: Sequence) -> None:
        """Others may wait for its prompt from now on, until `release`."""
        self._leaders[sequence.request_id] = sequence

    def add(self, sequence: Sequence) -> bool:
        """Makes it wait for the leader that it names; False when there is nothing to wait for."""
        leader = sequence.request.leader
        if leader is None or self._leaders.get(leader, sequence) is sequence:
            return False
        self._waiting.setdefault(leader, {})[sequence.request_id] = sequence
        return True

    def remove(self, sequence: Sequence) -> bool:
        """It waits no longer; False when it did not."""
        if sequence not in self:
            return False
        del self._waiting[sequence.request.leader or ""][sequence.request_id]
        return True

    def release(self, leaders: Iterable[Sequence]) -> list[Sequence]:
        """Sequences that waited for these prompts, which are computed or never will be."""
        released: list[Sequence] = []
        for leader in leaders:
            if self._leaders.pop(leader.request_id, None) is not None and self._waiting:
                released += self._waiting.pop(leader.request_id, {}).values()
        return released


class WaitingSequences:
    """Knows where each of them waits, and counts all live ones.

    Args:
        cost: predicts what clients are charged.
        shared_from: a prompt of so many tokens has blocks that other choices of its call can
            share, so that they wait for it; None where no blocks are shared.

    Attributes:
        ranks: live sequences of each priority.
    """

    def __init__(self, cost: StepCost, *, fcfs: bool, shared_from: int | None) -> None:
        self._cost = cost
        self.share = FairShare()
        self.queue = WaitingQueue(self.share, fcfs=fcfs)
        self.ranks: Counter[int] = Counter()
        self._shared_from = shared_from
        self._followers = Followers()
        self._held: dict[str, Sequence] = {}
        """Sequences that cannot be computed yet, for another reason than their leader's prompt."""

    def __len__(self) -> int:
        return len(self.queue) + len(self._held) + len(self._followers)

    def enter(self, sequence: Sequence, *, hold: bool) -> None:
        """Takes a new one in; with `hold` it waits for `release`."""
        self.share.enter(sequence.request.client, sequence.request.share)
        self.ranks[self.queue.asked(sequence)] += 1
        self._followers.may_lead(sequence)
        if hold:
            self._held[sequence.request_id] = sequence
        else:
            self._line_up(sequence)

    def release(self, sequence: Sequence) -> None:
        """Queues a held sequence; does nothing for others."""
        if self._held.pop(sequence.request_id, None) is not None:
            self._line_up(sequence)

    def _line_up(self, sequence: Sequence) -> None:
        long_enough = self._shared_from is not None and sequence.num_prompt >= self._shared_from
        if not (long_enough and sequence.all_scored and self._followers.add(sequence)):
            self.queue.push(sequence)

    def has_followers(self, sequence: Sequence) -> bool:
        """True if a sequence waits for this one's prompt."""
        return self._followers.wait_for(sequence)

    def release_followers(self, leaders: list[Sequence]) -> None:
        """Resumes sequences that were waiting for the prompts of `leaders`."""
        for follower in self._followers.release(leaders):
            self.queue.push(follower)

    def take_out(self, sequence: Sequence) -> None:
        """Removes a waiting sequence, wherever it waits."""
        if not (self._held.pop(sequence.request_id, None) or self._followers.remove(sequence)):
            self.queue.remove(sequence)

    def part(self, sequences: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences in the queue, and all others."""
        queued: list[Sequence] = []
        elsewhere: list[Sequence] = []
        held, followers = self._held, self._followers
        for sequence in sequences:
            is_held = held and sequence.request_id in held
            if sequence.row >= 0 or is_held or (followers and sequence in followers):
                elsewhere.append(sequence)
            else:
                queued.append(sequence)
        return queued, elsewhere

    def charge_prompt(self, sequence: Sequence, num_cached: int) -> int:
        """The slot of the client of a sequence that is admitted with so many cached tokens. Where
        it might be admitted again in place of other clients, it is charged for the prompt at once,
        so that the rows of one step are shared between them."""
        slot = self.share.slot(sequence.request.client)
        if self.share.has_more(slot) and not sequence.was_preempted:
            self.share.charge(slot, self._prompt_ms(sequence.num_prompt - num_cached, num_cached))
            sequence.num_charged = sequence.num_prompt
        return slot

    def charge(self, batch: Batch, table: RowTable) -> None:
        """Charges the clients of rows for a step: decodes share what it takes whatever it holds."""
        if len(self.share) > 1:
            if (rows := batch.decodes).size:
                fixed, each, context, *_ = self._cost.rates
                costs_ms = each * batch.decode_lengths + context * table.computed[rows]
                self.share.charge_all(table.client[rows], costs_ms + fixed / rows.size)
            for chunk in batch.chunks:
                start = chunk.start + chunk.num_tokens - chunk.num_new
                cost_ms = self._prompt_ms(chunk.num_new, start)
                self.share.charge(table.client.item(chunk.sequence.row), cost_ms)

    def _prompt_ms(self, num_tokens: int, start: int) -> float:
        """The cost of a prompt's tokens from `start` on."""
        *_, token, work = self._cost.rates
        return num_tokens * (token + work * (start + num_tokens / 2))

    def leave(self, sequences: list[Sequence]) -> None:
        """Counts sequences out that have ended."""
        self.release_followers(sequences)
        self.share.leave(Counter([sequence.request.client for sequence in sequences]))
        if len(self.ranks) == 1:
            self.ranks -= Counter(dict.fromkeys(self.ranks, len(sequences)))
        else:
            self.ranks -= Counter([self.queue.asked(sequence) for sequence in sequences])


Clock = Callable[[], float]


class QueueDeadlines:
    """Sequences that wait with a deadline; those without one are not kept here.

    Args:
        live: sequences that have not ended, by request id.
        clock: seconds, which never go back.
    """

    def __init__(self, live: Mapping[str, Sequence], clock: Clock = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._due: list[tuple[float, int, str]] = []
        """A heap of times, with the arrivals and the ids of the sequences: those of sequences that
        have ended or run by now stay in it until they are due, or too many."""
        self._stopped_s: float | None = None

    def stop(self, is_stopped: bool) -> None:
        """Stops the time, or lets it go on: while nobody runs, nobody waits for a turn."""
        now_s = self._clock()
        if self._stopped_s is not None:
            late_s = now_s - self._stopped_s
            self._due = [(due_s + late_s, number, name) for due_s, number, name in self._due]
        self._stopped_s = now_s if is_stopped else None

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, sequence: Sequence) -> None:
        """Begins to watch a live sequence, if it has a deadline. A call's first choice decides for
        all: once that runs, the call has had its turn."""
        timeout_s = sequence.request.queue_timeout_s
        if not timeout_s or sequence.request.leader is not None:
            return
        entry = (self._clock() + timeout_s, sequence.arrival, sequence.request_id)
        heapq.heappush(self._due, entry)
        if len(self._due) > 2 * len(self._live) + 64:
            self._due = [entry for entry in self._due if self._waiting(entry) is not None]
            heapq.heapify(self._due)

    def expired(self) -> list[Sequence]:
        """Sequences that have waited too long, each once."""
        now_s, found = self._clock(), list[Sequence]()
        while self._due and self._due[0][0] <= now_s:
            sequence = self._waiting(heapq.heappop(self._due))
            if sequence is not None:
                found.append(sequence)
        return found

    def _waiting(self, entry: tuple[float, int, str]) -> Sequence | None:
        """The sequence of an entry, if it has never had a row."""
        _, arrival, request_id = entry
        sequence = self._live.get(request_id)
        if sequence is None or sequence.arrival != arrival:
            return None
        return None if sequence.row >= 0 or sequence.was_preempted else sequence


def timed_out(sequence: Sequence) -> QueueTimeoutError:
    """The error of a sequence that has waited too long."""
    return QueueTimeoutError(
        f"the request waited {sequence.request.queue_timeout_s:g} s for its turn, which is as long"
        " as --queue-timeout-s lets it: send it again later"
    )
