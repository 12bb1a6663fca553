"""Nobody starves: lower priorities get turns while better requests keep coming."""

from __future__ import annotations

import pytest

from .harness import QUIET, Harness


def under_load(harness: Harness, low: list[str], steps: int = 1500) -> list[str]:
    """Better requests wait at all times until the `low` ones have ended; gives the order."""
    count = 0
    for _ in range(steps):
        if all(name in harness.last for name in low):
            return harness.order
        while harness.core.stats().num_waiting < len(low) + 4:
            harness.add([count % 40] * 5, 3, client=f"c{count % 3}", name=f"better{count}")
            count += 1
        harness.step()
    raise AssertionError(f"{low} starve: {count} better requests came")


@pytest.mark.parametrize("rows", [1, 4])
def test_a_lower_priority_gets_its_turn(rows: int) -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": rows})
    harness.add([1] * 5, 3)
    harness.step()
    low = harness.add([2] * 5, 20, priority=9)
    order = under_load(harness, [low])
    assert 12 <= order.index(low) <= 17
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_who_got_a_turn_is_not_preempted_for_those_that_it_went_before() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 1})
    low = harness.add([2] * 5, 30, priority=9)
    harness.step()
    under_load(harness, [low])
    assert harness.core.stats().num_preemptions == 1  # at the start, when it had no turn yet
    harness.run()
    harness.check_outputs()


def test_all_priorities_take_turns() -> None:
    """No crowd at one lower priority and no large request holds up the others."""
    harness = Harness(rules=QUIET, config={"max_num_seqs": 2}, model={"num_blocks": 9})
    harness.add([1] * 5, 3)
    harness.step()
    crowd = [harness.add([3] * 5, 2, priority=3) for _ in range(6)]
    large = harness.add([4] * 50, 5, priority=4)
    last = harness.add([5] * 5, 2, priority=5)
    order = under_load(harness, [crowd[0], large, last])
    assert order.index(crowd[0]) <= 18
    assert max(order.index(large), order.index(last)) <= 3 * 17 + 3
    harness.run()
    assert [name for name in harness.order if name in crowd] == crowd
    harness.check_outputs()


def test_the_order_of_one_priority_stays_as_it_is() -> None:
    orders = []
    for priority in (0, 7):
        harness = Harness(rules=QUIET, config={"max_num_seqs": 1})
        for index in range(60):
            client = "greedy" if index < 40 else "modest"
            harness.add([index % 40] * 5, 2, client=client, priority=priority)
        harness.run()
        orders.append(harness.order)
    assert orders[0] == orders[1]


def test_fcfs_knows_no_turns() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 1, "scheduling_policy": "fcfs"})
    names = [harness.add([index % 40] * 5, 2, priority=-index) for index in range(50)]
    harness.run()
    assert harness.order == names


def test_priorities_that_nobody_has_any_more_are_forgotten() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 1})
    for priority in range(500):
        harness.abort(harness.add([1], 2, priority=priority))
    queue = harness.core._scheduler.queue
    assert len(queue._turns) < 20
