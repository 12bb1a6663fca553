"""The order of waiting sequences: priority, then each client's fair share, then arrival."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.core.sequence import Sequence

V = TypeVar("V")
_MAX_REMEMBERED = 4096
_TURN_EVERY = 16
"""The number of admissions after which, while several priorities wait, one is of another than the
best."""
_NO_PRIORITY = 1 << 31
"""Greater than any."""
_Head = tuple[float, int, str]
"""The client's service, the arrival of its first request, and its name."""


class Ordered(dict[int, V]):
    """Values by distinct whole numbers: a dictionary that changes by `add` and `take` alone.

    A heap holds the numbers. A value taken from the middle leaves its number in the heap until the
    number reaches the front or half of the heap is stale. So every operation but iteration takes
    amortised logarithmic time.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[int] = []

    def add(self, number: int, value: V) -> None:
        """Puts a value in its place."""
        assert number not in self, number
        self[number] = value
        heapq.heappush(self._heap, number)

    def take(self, number: int) -> V:
        """Removes and returns a value, wherever it is in the order."""
        value = self.pop(number)
        if len(self._heap) > 2 * len(self) + 16:
            self._heap = list(self)
            heapq.heapify(self._heap)
        return value

    def least(self) -> int:
        """The smallest number; there must be one."""
        heap = self._heap
        while heap[0] not in self:
            heapq.heappop(heap)
        return heap[0]

    def first(self) -> V:
        """The value of the smallest number; there must be one."""
        return self[self.least()]


class FairShare:
    """Milliseconds of steps that each client was given, over its share ("virtual token counter",
    with weights and a cost function: Sheng et al., "Fairness in serving large language models",
    OSDI 2024). The client with the fewest is served next. A client that returns after a pause
    starts no lower than the least served one, so that idling saves up nothing.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._live = [0] * 16
        """Requests of the client of each slot."""
        self._service = np.full(16, np.inf)
        """The service of each slot; infinite where no client lives."""
        self._weight = np.ones(16)
        """The charge for a millisecond of each slot's client: one over its share."""
        self._free = list(range(15, -1, -1))
        self._left: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Clients with live requests."""
        return len(self._slots)

    def enter(self, client: str, share: float = 1.0) -> None:
        """A request of the client begins to wait; the last one that came says what its share is."""
        slot = self._slots.get(client)
        if slot is not None:
            self._live[slot] += 1
            self._weight[slot] = 1.0 / share
            return
        if not self._free:
            size = self._service.size
            self._service = np.concatenate([self._service, np.full(size, np.inf)])
            self._weight = np.concatenate([self._weight, np.ones(size)])
            self._live += [0] * size
            self._free = list(range(2 * size - 1, size - 1, -1))
        least = float(self._service.min()) if self._slots else 0.0
        slot = self._free.pop()
        self._service[slot] = max(self._left.pop(client, 0.0), least)
        self._weight[slot] = 1.0 / share
        self._slots[client] = slot
        self._live[slot] = 1

    def leave(self, ended: Mapping[str, int]) -> None:
        """Counts requests of each client that ended."""
        gone: list[str] = []
        for client, count in ended.items():
            slot = self._slots[client]
            self._live[slot] -= count
            if not self._live[slot]:
                gone.append(client)
        if not gone:
            return
        slots = [self._slots.pop(client) for client in gone]
        kept = slice(-_MAX_REMEMBERED, None)
        self._left.update(zip(gone[kept], self._service[slots[kept]].tolist(), strict=True))
        self._service[slots] = np.inf
        self._free += slots
        while len(self._left) > _MAX_REMEMBERED:
            self._left.popitem(last=False)
        if not self._slots:
            self._left.clear()

    def slot(self, client: str) -> int:
        """Index of a live client, for `charge`."""
        return self._slots[client]

    def service(self, client: str) -> float:
        """Milliseconds of a live client over its share, more or less."""
        service: float = self._service.item(self._slots[client])
        return service

    def has_more(self, slot: int) -> bool:
        """True if there are other clients, and this one has further requests."""
        return self._live[slot] > 1 and len(self._slots) > 1

    def charge(self, slot: int, cost_ms: float) -> None:
        """Adds to what one client was given."""
        self._service[slot] += cost_ms * self._weight.item(slot)

    def charge_all(self, slots: AnyArray, costs_ms: AnyArray) -> None:
        """The same for the clients of many rows (R,), each with its cost (R,)."""
        self._service += np.bincount(slots, costs_ms, self._service.size) * self._weight


class _Class:
    """Requests of one priority."""

    __slots__ = ("_clients", "_heads", "_service", "ahead")

    def __init__(self, service: Callable[[str], float]) -> None:
        self._service = service
        self.ahead: Ordered[Sequence] = Ordered()
        """The sequences that go first: those that ran before, so that new ones do not take their
        place time and again, and those of a lower priority whose turn it is."""
        self._clients: dict[str, Ordered[Sequence]] = {}
        """New requests of each client, by arrival."""
        self._heads: list[_Head] = []
        """A heap with an entry for each client, of its first request or of an earlier one. A
        client's service only grows while it has requests, so an entry is never too far back: the
        front entry is checked, and moved where it belongs, before it is used."""

    def __bool__(self) -> bool:
        return bool(self._clients or self.ahead)

    def push(self, client: str, sequence: Sequence) -> None:
        line = self._clients.get(client)
        if line is None:
            line = self._clients[client] = Ordered()
        line.add(sequence.arrival, sequence)
        if line.least() == sequence.arrival:
            heapq.heappush(self._heads, self._head(client, line))
            self._drop_old_heads()

    def remove(self, client: str, sequence: Sequence) -> None:
        line = self._clients[client]
        line.take(sequence.arrival)
        if not line:
            del self._clients[client]

    def remove_all(self, sequences: list[Sequence], clients: list[str]) -> None:
        """Takes many out, each of its client."""
        counts = Counter(clients)
        num_whole = 0
        for client, count in counts.items():
            if count == len(self._clients[client]):
                del self._clients[client]
                num_whole += 1
        if num_whole < len(counts):
            for client, sequence in zip(clients, sequences, strict=True):
                line = self._clients.get(client)
                if line is not None:
                    line.take(sequence.arrival)
        self._drop_old_heads()

    def first(self) -> Sequence:
        """The first sequence of the client that was served least; there must be one."""
        if self.ahead:
            return self.ahead.first()
        while True:
            service, arrival, client = self._heads[0]
            line = self._clients.get(client)
            if line is None:
                heapq.heappop(self._heads)
            elif line.least() != arrival or self._service(client) != service:
                heapq.heapreplace(self._heads, self._head(client, line))
            else:
                return line[arrival]

    def _head(self, client: str, line: Ordered[Sequence]) -> _Head:
        return self._service(client), line.least(), client

    def _drop_old_heads(self) -> None:
        if len(self._heads) > 2 * len(self._clients) + 16:
            self._heads = [self._head(*item) for item in self._clients.items()]
            heapq.heapify(self._heads)


class WaitingQueue:
    """Sequences that wait for a row. `fcfs`: arrival alone decides.

    Finding the next sequence and removing any take a time independent of the queue's length.

    To prevent starvation, each 16th admission gives another priority a turn, in rotation: its first
    sequence moves ahead of all others. It keeps the rank of that turn, or a waiting sequence would
    preempt it as soon as it runs. With M priorities waiting, each has its next turn after at most
    16 M admissions.
    """

    def __init__(self, share: FairShare, *, fcfs: bool) -> None:
        self._service: Callable[[str], float] = _equal if fcfs else share.service
        self._fcfs = fcfs
        self._classes: Ordered[_Class] = Ordered()
        self._turns: OrderedDict[int, None] = OrderedDict()
        """Priorities by their next turn; some may have no sequences left."""
        self._num_admitted = 0
        """The number of admissions since the last turn, while others waited."""
        self._best_admitted = _NO_PRIORITY
        """The best priority among those admissions."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Takes a new or a preempted sequence in."""
        priority = self.priority(sequence)
        group = self._classes.get(priority)
        if group is None:
            group = _Class(self._service)
            self._classes.add(priority, group)
            self._turns.setdefault(priority)
            self._drop_old_turns()
        if _goes_ahead(sequence):
            group.ahead.add(sequence.arrival, sequence)
        else:
            group.push(self._client(sequence), sequence)
        self._length += 1

    def first(self) -> Sequence | None:
        """Returns the sequence that is next; it stays in the queue."""
        return self._classes.first().first() if self._length else None

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        priority = self.priority(sequence)
        group = self._classes.get(priority)
        assert group is not None, sequence.request_id
        if _goes_ahead(sequence):
            group.ahead.take(sequence.arrival)
        else:
            group.remove(self._client(sequence), sequence)
        if not group:
            self._classes.take(priority)
        self._length -= 1

    def remove_all(self, sequences: Iterable[Sequence]) -> None:
        """Takes many out."""
        groups: defaultdict[int, list[Sequence]] = defaultdict(list)
        for sequence in sequences:
            rank = sequence.rank
            if sequence.was_preempted or rank != sequence.request.priority:  # it goes ahead
                self.remove(sequence)
            else:
                groups[0 if self._fcfs else rank].append(sequence)
        for priority, members in groups.items():
            group = self._classes.get(priority)
            assert group is not None, priority
            if self._fcfs:
                clients = [""] * len(members)
            else:
                clients = [sequence.request.client for sequence in members]
            group.remove_all(members, clients)
            if not group:
                self._classes.take(priority)
            self._length -= len(members)

    def admit(self, sequence: Sequence) -> None:
        """Takes out the `first` one, which gets a row; then it may be another priority's turn."""
        self.remove(sequence)
        if not self._length:
            self._num_admitted, self._best_admitted = 0, _NO_PRIORITY
            return
        self._num_admitted += 1
        self._best_admitted = min(self._best_admitted, self.priority(sequence))
        if self._num_admitted >= _TURN_EVERY:
            best = min(self._best_admitted, self._classes.least())
            self._num_admitted, self._best_admitted = 0, _NO_PRIORITY
            self._give_turn(best)

    def _give_turn(self, best: int) -> None:
        """Puts the first one of the next priority that is not `best` before all others."""
        for _ in range(len(self._turns)):
            priority, _ = self._turns.popitem(last=False)
            group = self._classes.get(priority)
            if group is None:
                continue
            self._turns[priority] = None
            if priority != best:
                sequence = group.first()
                self.remove(sequence)
                sequence.rank = best
                self.push(sequence)
                return

    def _drop_old_turns(self) -> None:
        if len(self._turns) > 2 * len(self._classes) + 16:
            left = [priority for priority in self._turns if priority in self._classes]
            self._turns = OrderedDict.fromkeys(left)

    def priority(self, sequence: Sequence) -> int:
        """Smaller is served first."""
        return 0 if self._fcfs else sequence.rank

    def asked(self, sequence: Sequence) -> int:
        """The priority that a sequence asked for, before any turn that it was given."""
        return 0 if self._fcfs else sequence.request.priority

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        """True if it is served before the other by priority alone."""
        return self.priority(sequence) < self.priority(other)

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """The order of running sequences: the greatest is preempted first."""
        return self.priority(sequence), sequence.arrival

    def _client(self, sequence: Sequence) -> str:
        return "" if self._fcfs else sequence.request.client


def _goes_ahead(sequence: Sequence) -> bool:
    return sequence.was_preempted or sequence.rank != sequence.request.priority


def _equal(client: str) -> float:
    """Returns equal service for all clients, so that arrival alone decides."""
    return 0.0
