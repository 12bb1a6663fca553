"""Virtual token counters of clients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_engine.core.cost import StepCost, StepLoad
from vllmx_engine.core.fair_queue import FairShare, WaitingQueue
from vllmx_testing.fake import FakeRules, FakeStep

from .harness import Harness
from .test_waiting import waiting


def charge(share: FairShare, **tokens: int) -> None:
    for client, count in tokens.items():
        share.charge(share.slot(client), count)


def test_counts_tokens_of_each_client() -> None:
    share = FairShare()
    for client in ("a", "b", "a"):
        share.enter(client)
    charge(share, a=3, b=5)
    charge(share, a=4)
    assert (share.service("a"), share.service("b")) == (7, 5)
    assert len(share) == 2


def test_a_newcomer_starts_with_the_least_served() -> None:
    share = FairShare()
    share.enter("a")
    share.enter("b")
    charge(share, a=30, b=50)
    share.enter("c")
    assert share.service("c") == 30


def test_leaving_for_a_moment_does_not_wipe_out_what_one_had() -> None:
    share = FairShare()
    for client in ("a", "b"):
        share.enter(client)
    charge(share, a=90, b=20)
    share.leave({"a": 1})
    share.enter("a")
    assert share.service("a") == 90
    charge(share, b=100)
    share.leave({"a": 1})
    share.enter("a")
    assert share.service("a") == 120


def test_many_clients_come_and_go() -> None:
    share = FairShare()
    for index in range(100):
        share.enter(f"c{index}")
    assert len({share.slot(f"c{index}") for index in range(100)}) == 100
    for index in range(100):
        share.leave({f"c{index}": 1})
    assert len(share) == 0
    share.enter("again")
    assert share.service("again") == 0


def test_a_share_of_two_is_given_twice_as_much() -> None:
    share = FairShare()
    share.enter("a", 2.0)
    share.enter("b")
    charge(share, a=30, b=30)
    assert (share.service("a"), share.service("b")) == (15, 30)
    share.charge_all(np.array([share.slot(client) for client in "ba" * 6]), np.ones(12))
    assert (share.service("a"), share.service("b")) == (18, 36)
    share.enter("b", 4.0)  # its key was given another share
    charge(share, b=8)
    assert share.service("b") == 38


SHARES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=6)


@settings(max_examples=100)
@given(shares=SHARES, sizes=st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_who_always_waits_is_given_its_share(shares: list[float], sizes: list[int]) -> None:
    """What two clients that always wait were given over their shares differs by no more than the
    largest request over the smaller share, and a newcomer's one request is next but for a request
    of each of them."""
    share = FairShare()
    queue = WaitingQueue(share, fcfs=False)
    arrivals, served_to = itertools.count(), dict.fromkeys(map(str, range(len(shares))), 0.0)

    def join(client: str, weight: float) -> None:
        share.enter(client, weight)
        queue.push(waiting(next(arrivals), client=client, share=weight))

    def admit(size: int) -> str:
        head = queue.first()
        assert head is not None
        queue.admit(head)
        share.charge(share.slot(head.request.client), size)
        return head.request.client

    weights = dict(zip(served_to, shares, strict=True))
    for client in served_to:
        for _ in range(2):
            join(client, weights[client])
    for size in sizes:
        client = admit(size)
        served_to[client] += size
        join(client, weights[client])
        served = [served_to[each] / weights[each] for each in served_to]
        assert max(served) - min(served) <= max(sizes) / min(shares) + 1e-9
    join("new", 1.0)
    order = [admit(max(sizes)) for _ in range(len(shares) + 1)]
    assert "new" in order


def test_rows_are_shared_while_all_wait() -> None:
    """The core shares: all rows become free at once, time and again."""
    harness = Harness(config={"max_num_seqs": 4}, rules=FakeRules(48, eos_id=None))
    for client, weight in (("a", 1.0), ("b", 3.0)):
        for number in range(40):
            prompt = [number % 40, 1, 2, 3]
            harness.add(prompt, 2, name=f"{client}{number}", client=client, share=weight)
    harness.run()
    for count in (12, 24, 36, 48):  # of 40 that "b" has in all
        num_b = sum(name.startswith("b") for name in harness.order[:count])
        assert abs(num_b - 3 * count / 4) <= 4


def test_tokens_cost_what_steps_took() -> None:
    cost = StepCost(None, 16)
    assert cost.rates == (0.0, 1.0, 0.0, 1.0, 0.0), "before anything is known all tokens are equal"
    for index in range(64):
        decodes, context, chunk = index % 7, 50 * (index % 11), 32 * (index % 3)
        load = StepLoad(decodes, context, chunk, 10.0 * chunk * (index % 5))
        took = 4e-3 + 2e-3 * load[0] + 1e-5 * load[1] + 1e-4 * load[2] + 1e-7 * load[3]
        cost.observe(load, took)
    assert cost.rates == pytest.approx((4.0, 2.0, 0.01, 0.1, 1e-4), rel=0.05)


def test_clients_share_seconds() -> None:
    """Pairs of positions take most of the time here, so that a client with long prompts gets fewer
    tokens than one with short ones: 200 tokens cost 2.2 s, 29 cost 75 ms."""
    sizes = {"num_blocks": 200, "max_tokens": 256}
    harness = Harness(
        rules=FakeRules(48, eos_id=None), model=sizes, config={"max_num_seqs": 2}, max_model_len=512
    )
    step = harness.loaded.step

    def timed(plan: StepPlan, rows: SamplingRows) -> FakeStep:
        handle = step(plan, rows)
        handle._result.elapsed_s = 1e-3 * plan.num_tokens + 1e-4 * float((plan.positions + 1).sum())
        return handle

    harness.loaded.step = timed  # type: ignore[method-assign]
    for number in range(100):
        if number < 6:
            harness.add([number, *[1] * 199], 1, name=f"long{number}", client="long")
        harness.add([number % 40, number // 40, *[2] * 18], 10, client="short")
    harness.run()
    third = [index for index, name in enumerate(harness.order) if name.startswith("long")][3]
    assert third > 45, "by tokens it would be after some 20 short ones"
