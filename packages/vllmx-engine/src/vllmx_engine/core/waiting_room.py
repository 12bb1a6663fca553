"""Live sequences without a row: in the queue, behind the one whose prompt they share, or held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllmx_engine.core.followers import Followers
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.waiting import FairShare, WaitingQueue


class WaitingRoom:
    """Knows where each of them waits, and counts all live ones.

    Args:
        shared_from: a prompt of so many tokens has blocks that other choices of its call can
            share, so that they wait for it; None where no blocks are shared.

    Attributes:
        ranks: live sequences of each priority.
    """

    def __init__(self, *, fcfs: bool, shared_from: int | None) -> None:
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
        """What it was held for is there; one that was not held is left alone."""
        if self._held.pop(sequence.request_id, None) is not None:
            self._line_up(sequence)

    def _line_up(self, sequence: Sequence) -> None:
        long_enough = self._shared_from is not None and sequence.num_prompt >= self._shared_from
        if not (long_enough and sequence.all_scored and self._followers.add(sequence)):
            self.queue.push(sequence)

    def has_followers(self, sequence: Sequence) -> bool:
        """Whether any waits for this one's prompt."""
        return self._followers.wait_for(sequence)

    def release_followers(self, leaders: list[Sequence]) -> None:
        """Lets those go on who waited for the prompts of `leaders`."""
        for follower in self._followers.release(leaders):
            self.queue.push(follower)

    def take_out(self, sequence: Sequence) -> None:
        """It waits no longer, wherever it did."""
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

    def leave(self, sequences: list[Sequence]) -> None:
        """They ended, and wait nowhere any more."""
        self.release_followers(sequences)
        self.share.leave(Counter([sequence.request.client for sequence in sequences]))
        if len(self.ranks) == 1:
            self.ranks -= Counter(dict.fromkeys(self.ranks, len(sequences)))
        else:
            self.ranks -= Counter([self.queue.asked(sequence) for sequence in sequences])
