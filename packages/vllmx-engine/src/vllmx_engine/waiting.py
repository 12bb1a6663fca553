"""Who is next: priority, then fair share of each client, then arrival."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.sequence import Sequence

_MAX_REMEMBERED = 4096


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class FairShare:
    """Tokens computed for each client ("virtual token counter": Sheng et al., "Fairness in serving
    large language models", OSDI 2024). The client with the fewest is served next. Who comes back
    from a pause starts no lower than the least served one, so that idling saves up nothing.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._service = np.zeros(16)
        self._free = list(range(15, -1, -1))
        self._left: dict[str, float] = {}

    def __len__(self) -> int:
        """Clients with live requests."""
        return len(self._slots)

    def enter(self, client: str) -> None:
        """A request of the client begins to wait."""
        if client in self._slots:
            self._live[client] += 1
            return
        if not self._free:
            size = self._service.size
            self._service = np.concatenate([self._service, np.zeros(size)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        least = min((self._service[slot] for slot in self._slots.values()), default=0.0)
        slot = self._free.pop()
        self._service[slot] = max(self._left.pop(client, 0.0), least)
        self._slots[client] = slot
        self._live[client] = 1

    def leave(self, client: str) -> None:
        """A request of the client ended."""
        self._live[client] -= 1
        if self._live[client]:
            return
        del self._live[client]
        slot = self._slots.pop(client)
        self._left[client] = float(self._service[slot])
        self._free.append(slot)
        if len(self._left) > _MAX_REMEMBERED:
            del self._left[next(iter(self._left))]
        if not self._slots:
            self._left.clear()

    def slot(self, client: str) -> int:
        """Index of a live client, for `charge`."""
        return self._slots[client]

    def service(self, client: str) -> float:
        """Tokens computed for a live client, more or less."""
        return float(self._service[self._slots[client]])

    def charge(self, slots: AnyArray, tokens: AnyArray) -> None:
        """Adds to the clients in `slots` the tokens of a step, one entry a row."""
        self._service += np.bincount(slots, tokens, self._service.size)


@dataclass(slots=True)
class _Class:
    """Requests of one priority."""

    preempted: list[Sequence] = field(default_factory=list)
    """They ran before and go first, so that new ones do not take their place again and again."""
    clients: dict[str, list[Sequence]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.preempted or self.clients)


class WaitingQueue:
    """Sequences that wait for a row. `fcfs`: arrival alone decides."""

    def __init__(self, share: FairShare, *, fcfs: bool) -> None:
        self._share = share
        self._fcfs = fcfs
        self._classes: dict[int, _Class] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Takes a new or a preempted sequence in."""
        group = self._classes.setdefault(self.priority(sequence), _Class())
        if sequence.was_preempted:
            insort(group.preempted, sequence, key=_arrival)
        else:
            lane = group.clients.setdefault(self._lane(sequence), [])
            insort(lane, sequence, key=_arrival)
        self._length += 1

    def first(self) -> Sequence | None:
        """Who is next; stays in the queue."""
        if not self._classes:
            return None
        group = self._classes[min(self._classes)]
        if group.preempted:
            return group.preempted[0]
        heads = [lane[0] for lane in group.clients.values()]
        if len(heads) == 1:
            return heads[0]
        return min(heads, key=lambda head: (self._share.service(head.request.client), head.arrival))

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        priority = self.priority(sequence)
        group = self._classes[priority]
        if sequence.was_preempted:
            group.preempted.remove(sequence)
        else:
            lane = group.clients[self._lane(sequence)]
            lane.remove(sequence)
            if not lane:
                del group.clients[self._lane(sequence)]
        if not group:
            del self._classes[priority]
        self._length -= 1

    def priority(self, sequence: Sequence) -> int:
        """Smaller is served first."""
        return 0 if self._fcfs else sequence.request.priority

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        """By priority alone."""
        return self.priority(sequence) < self.priority(other)

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Of running sequences: the greatest is preempted first."""
        return self.priority(sequence), sequence.arrival

    def _lane(self, sequence: Sequence) -> str:
        return "" if self._fcfs else sequence.request.client
