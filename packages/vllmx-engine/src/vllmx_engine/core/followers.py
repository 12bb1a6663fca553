"""Choices of a call that wait until the first one has computed the prompt that they share."""

from __future__ import annotations

from collections.abc import Iterable

from vllmx_engine.core.sequence import Sequence


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
        """Whether it waits for another's prompt."""
        leader = sequence.request.leader
        return leader is not None and sequence.request_id in self._waiting.get(leader, ())

    def wait_for(self, leader: Sequence) -> bool:
        """Whether any waits for this one's prompt."""
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
