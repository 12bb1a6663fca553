"""A model in stages: several steps in flight, a row in one of them."""

from __future__ import annotations

import pytest
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_testing.fake import FakeStep

from .harness import QUIET, Harness, prompts


class Watched(Harness):
    """Knows how many steps were in flight, and of how many rows each was."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.depths: list[int] = []
        step = self.loaded.step

        def watch(plan: StepPlan, rows: SamplingRows) -> FakeStep:
            handle = step(plan, rows)
            self.depths.append(len(self.loaded.in_flight))
            return handle

        self.loaded.step = watch  # type: ignore[method-assign]


def staged(stages: int, **more: object) -> Watched:
    return Watched({"num_stages": stages}, dict(more), QUIET)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_rows_are_shared_out_among_as_many_steps_as_stages(stages: int) -> None:
    harness = staged(stages)
    for prompt in prompts(8, longest=4):
        harness.add(prompt, 12)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    assert max(harness.depths) == stages
    records = harness.loaded.records
    steady = [len(record.lengths) for record in records[2 : -2 * stages]]
    assert set(steady) == {-(-8 // stages), 8 - (stages - 1) * -(-8 // stages)} - {0}
    assert harness.depths.count(stages) > len(harness.depths) // 2


def test_a_single_row_waits_for_each_of_its_tokens() -> None:
    harness = staged(3)
    harness.add([1, 2, 3], 6)
    harness.run()
    harness.check_outputs()
    assert harness.depths == [1] * 6


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    harness = Watched({"num_stages": 3, "max_tokens": 8}, {}, QUIET)
    harness.add(list(range(30)), 1)
    harness.run()
    harness.check_outputs()
    assert harness.depths == [1, 2, 3, 3]


def test_without_overlap_one_step_is_in_flight() -> None:
    harness = staged(3, async_scheduling=False)
    for prompt in prompts(6):
        harness.add(prompt, 6)
    harness.run()
    harness.check_outputs()
    assert set(harness.depths) == {1}


def test_who_is_preempted_waits_for_what_is_in_flight() -> None:
    """The row would draw the token that is on its way a second time otherwise."""
    harness = staged(4, max_num_seqs=2)
    for prompt in prompts(2, longest=4):
        harness.add(prompt, 8)
    while len(harness.loaded.in_flight) < 2:  # both decode, each in a step of its own
        harness.step()
    urgent = harness.add([1, 2], 2, priority=-1)
    harness.step()
    assert harness.core.stats().num_preemptions == 1
    harness.abort(urgent)  # and there is a row again
    harness.step()
    assert harness.core.stats().num_running == 1
    harness.run()
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("at_launch", [False, True])
def test_a_step_that_fails_ends_its_own_rows_alone(at_launch: bool) -> None:
    harness = staged(3)
    for prompt in prompts(6, longest=4):
        harness.add(prompt, 12)
    harness.order_fault(6, at_launch=at_launch)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    ends = [last.finish_reason for last in harness.last.values()]
    assert ends.count("error") == 2
