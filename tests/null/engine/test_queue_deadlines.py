"""Requests that wait too long for a row end, and nobody else does."""

from __future__ import annotations

import pytest
from vllmx_core.errors import QueueTimeoutError
from vllmx_engine.client.request_table import error_of

from .harness import Harness


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def harness(clock: Clock) -> Harness:
    return Harness(config={"max_num_seqs": 1}, clock=clock)


def test_who_waits_too_long_ends_and_its_place_is_free(harness: Harness, clock: Clock) -> None:
    first = harness.add([1] * 20, 6, queue_timeout_s=5.0)
    late = harness.add([2] * 20, 6, queue_timeout_s=5.0)
    patient = harness.add([3] * 20, 6)
    harness.step()
    clock.now_s += 4.9
    harness.step()
    assert late not in harness.last
    clock.now_s += 0.2
    harness.step()
    error = error_of(harness.last[late])
    assert isinstance(error, QueueTimeoutError)
    assert "5 s" in error.message
    assert "--queue-timeout-s" in error.message
    assert harness.core.stats().num_waiting == 1
    harness.run()
    for name in (first, patient):  # the one that ran, though it took longer than its deadline
        harness.check_output(name)
    harness.check_idle()


def test_who_was_preempted_has_had_its_turn(harness: Harness, clock: Clock) -> None:
    begun = harness.add([1] * 20, 12, priority=1, queue_timeout_s=5.0)
    for _ in range(3):
        harness.step()
    urgent = harness.add([2] * 20, 4, priority=0)
    for _ in range(2):
        harness.step()
    assert harness.core._scheduler.live[begun].was_preempted
    clock.now_s += 60.0
    harness.run()
    harness.check_output(begun)
    harness.check_output(urgent)


def test_a_pause_is_no_waiting(harness: Harness, clock: Clock) -> None:
    names = [harness.add([number] * 20, 6, queue_timeout_s=5.0) for number in range(3)]
    harness.step()
    clock.now_s += 2.0
    for _ in range(2):  # paused twice without a resume between
        harness.core.pause(True)
        clock.now_s += 60.0
    harness.core.pause(False)
    clock.now_s += 2.0
    harness.step()
    assert harness.core.stats().num_waiting == 2
    clock.now_s += 2.0
    harness.step()
    for late in names[1:]:
        assert isinstance(error_of(harness.last[late]), QueueTimeoutError)


def test_the_choices_of_a_call_go_by_the_first(harness: Harness, clock: Clock) -> None:
    names = [harness.add([1] * 20, 6, name="a", queue_timeout_s=5.0)]
    names += [
        harness.add([1] * 20, 6, name=f"a{number}", leader="a", queue_timeout_s=5.0)
        for number in range(2)
    ]
    harness.step()
    clock.now_s += 60.0
    harness.run()
    for name in names:
        harness.check_output(name)


def test_deadlines_of_ended_requests_are_forgotten(harness: Harness) -> None:
    for number in range(300):
        harness.add([number % 50], 1, queue_timeout_s=5.0)
        harness.run()
    assert len(harness.core._deadlines._due) <= 66
