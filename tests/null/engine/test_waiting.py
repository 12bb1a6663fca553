"""The waiting queue: who is next is what a search of the whole queue finds, at the cost of none."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.fair_queue import FairShare, WaitingQueue
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.wire.messages import CoreRequest, pack_ids

LIMITS = Limits(
    token_budget=64,
    max_rows=8,
    max_logit_rows=8,
    max_model_len=64,
    num_blocks=64,
    block_size=8,
    vocab_size=48,
)
CLIENTS = ("a", "b", "c", "d")


def waiting(arrival: int, **fields: Any) -> Sequence:
    request = CoreRequest(
        request_id=f"r{arrival}",
        prompt=pack_ids([1]),
        params=SamplingParams(),
        max_tokens=1,
        seed=0,
        **fields,
    )
    return Sequence(request, arrival, LIMITS)


def by_search(queue: list[Sequence], share: FairShare, *, fcfs: bool) -> Sequence | None:
    """Priority, who ran before, fair share, arrival."""

    def order(sequence: Sequence) -> tuple[int, bool, float, int]:
        client = sequence.request.client
        served = 0.0 if fcfs or sequence.was_preempted else share.service(client)
        priority = 0 if fcfs else sequence.request.priority
        return priority, not sequence.was_preempted, served, sequence.arrival

    return min(queue, key=order, default=None)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "admit", "preempt", "abort", "charge", "aside"]),
        st.integers(0, 30),
        st.sampled_from(CLIENTS),
        st.integers(-1, 1),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(actions=ACTIONS, fcfs=st.booleans())
def test_the_order_is_that_of_a_search(
    actions: list[tuple[str, int, str, int]], fcfs: bool
) -> None:
    share = FairShare()
    queue = WaitingQueue(share, fcfs=fcfs)
    inside: list[Sequence] = []
    running: list[Sequence] = []
    for arrival, (action, number, client, priority) in enumerate(actions):
        chosen = inside[number % len(inside)] if inside else None
        if action == "add":
            inside.append(waiting(arrival, client=client, priority=priority))
            share.enter(client)
            queue.push(inside[-1])
        elif action == "charge":
            for sequence in running:
                share.charge(share.slot(sequence.request.client), number)
        elif action == "preempt" and running:
            back = running.pop(number % len(running))
            back.was_preempted = True
            inside.append(back)
            queue.push(back)
        elif action == "aside" and chosen is not None:  # out and in again, as who does not fit
            queue.remove(chosen)
            assert queue.first() is by_search(
                [s for s in inside if s is not chosen], share, fcfs=fcfs
            )
            queue.push(chosen)
        elif action in ("admit", "abort") and chosen is not None:
            if action == "admit" and (first := queue.first()) is not None:
                chosen = first
                running.append(chosen)
                queue.admit(first)
            else:
                share.leave({chosen.request.client: 1})
                queue.remove(chosen)
            inside.remove(chosen)
        assert len(queue) == len(inside)
        assert queue.first() is by_search(inside, share, fcfs=fcfs)


class CountedShare(FairShare):
    """Counts how often somebody asks what a client was served."""

    num_asked = 0

    def service(self, client: str) -> float:
        self.num_asked += 1
        return super().service(client)


class Comparisons:
    """A counter for those of sequences and of their arrivals."""

    num = 0


class CountedInt(int):
    def __lt__(self, other: int) -> bool:
        Comparisons.num += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Comparisons.num += 1
        return int(self) == other

    __hash__ = int.__hash__


class CountedSequence(Sequence):
    def __eq__(self, other: object) -> bool:
        Comparisons.num += 1
        return self is other

    __hash__ = object.__hash__


def test_who_is_next_is_found_without_a_look_at_every_client() -> None:
    share = CountedShare()
    queue = WaitingQueue(share, fcfs=False)
    for arrival in range(1000):
        share.enter(f"c{arrival}")
        queue.push(waiting(arrival, client=f"c{arrival}"))
    share.num_asked = 0
    for _ in range(34):
        first = queue.first()
        assert first is not None
        queue.remove(first)
        share.charge(share.slot(first.request.client), 20)
    assert share.num_asked <= 34 * 2


def test_a_client_that_is_served_meanwhile_is_put_back_once() -> None:
    share = CountedShare()
    queue = WaitingQueue(share, fcfs=False)
    for arrival in range(1000):
        share.enter(f"c{arrival % 100}")
        queue.push(waiting(arrival, client=f"c{arrival % 100}"))
    share.num_asked = 0
    for turn in range(1000):
        first = queue.first()
        assert first is not None
        assert first.arrival == turn
        queue.remove(first)
        share.charge(share.slot(first.request.client), 5)
    assert share.num_asked <= 1000 * 6


def test_to_leave_costs_the_same_however_many_wait() -> None:
    """Requests are of one client, of many, and of as many priorities."""
    for fields in ({}, {"client": True}, {"priority": True}):
        share, count = FairShare(), 4000
        queue = WaitingQueue(share, fcfs=False)
        sequences = []
        for arrival in range(count):
            own = {"client": f"c{arrival}"} if "client" in fields else {"client": "one"}
            priority = arrival if "priority" in fields else 0
            share.enter(own["client"])
            request = waiting(arrival, **own, priority=priority).request
            sequences.append(CountedSequence(request, CountedInt(arrival), LIMITS))
            queue.push(sequences[-1])
        Comparisons.num = 0
        for sequence in sequences[::2] + sequences[::-2]:
            queue.remove(sequence)
            share.leave({sequence.request.client: 1})
        assert len(queue) == 0
        assert Comparisons.num <= 8 * count
