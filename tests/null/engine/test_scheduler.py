"""The order in which requests are served: policy, budget, pace of decodes, preemption."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_testing.fake import FakeRules

from .harness import VOCAB_SIZE, Harness

QUIET = FakeRules(vocab_size=VOCAB_SIZE)
ONE_AT_A_TIME = {"max_num_seqs": 1}


def test_fcfs_is_arrival() -> None:
    harness = Harness(rules=QUIET, config={**ONE_AT_A_TIME, "scheduling_policy": "fcfs"})
    names = [harness.add([index], 2, priority=-index, client=f"c{index % 2}") for index in range(6)]
    harness.run()
    assert harness.order == names


def test_smaller_priority_first_then_arrival() -> None:
    harness = Harness(rules=QUIET, config=ONE_AT_A_TIME)
    names = [harness.add([1, 2], 2, priority=priority) for priority in (1, 0, 1, -5, 0)]
    harness.run()
    assert harness.order == [names[index] for index in (3, 1, 4, 0, 2)]


def test_a_client_with_a_backlog_does_not_hold_up_another() -> None:
    harness = Harness(rules=QUIET, config=ONE_AT_A_TIME)
    greedy = [harness.add([i] * 9, 5, client="greedy") for i in range(10)]
    harness.step()
    modest = [harness.add([20 + i] * 9, 5, client="modest") for i in range(3)]
    harness.run()
    assert harness.order[:7] == [
        greedy[0],
        modest[0],
        greedy[1],
        modest[1],
        greedy[2],
        modest[2],
        greedy[3],
    ]
    harness.check_idle()


def test_fair_share_counts_tokens_not_requests() -> None:
    harness = Harness(rules=QUIET, config={**ONE_AT_A_TIME, "enable_prefix_caching": False})
    for index in range(12):
        harness.add([index] * 40, 10, client="long")
        harness.add([index] * 5, 5, client="short")
    harness.run()
    first = harness.order[:12]
    tokens = {"long": 0, "short": 0}
    for name in first:
        request = harness.requests[name]
        tokens[request.client] += len(request.prompt_ids) + request.max_tokens
    assert abs(tokens["long"] - tokens["short"]) <= 60
    short = sum(harness.requests[name].client == "short" for name in first)
    assert 8 <= short <= 10


def test_a_client_that_returns_saved_nothing_up() -> None:
    harness = Harness(rules=QUIET, config=ONE_AT_A_TIME)
    for index in range(12):
        harness.add([index] * 20, 10, client=f"steady {index % 2}")
    while len(harness.last) < 6:
        harness.step()
    late = [harness.add([20 + index] * 20, 10, client="late") for index in range(3)]
    harness.run()
    places = [harness.order.index(name) for name in late]
    assert places[0] <= 8
    assert places[2] >= places[0] + 4, "the newcomer was served in one go"


def test_a_higher_priority_goes_before_an_unfinished_prefill() -> None:
    harness = Harness(rules=QUIET, config={"max_num_batched_tokens": 8})
    slow = harness.add([1] * 40, 4)
    harness.step()
    urgent = harness.add([2] * 8, 1, priority=-1)
    harness.step()
    assert harness.loaded.records[-1].lengths == [8]
    harness.run()
    assert harness.order == [urgent, slow]
    harness.check_outputs()


def test_decodes_go_first_and_prefills_take_the_rest_of_the_budget() -> None:
    harness = Harness(rules=QUIET, model={"max_tokens": 10})
    for index in range(3):
        harness.add([index], 30)
    for _ in range(3):
        harness.step()
    harness.add([9] * 20, 2)
    for _ in range(3):
        harness.step()
    assert [record.lengths for record in harness.loaded.records[-3:]] == [
        [1, 1, 1, 7],
        [1, 1, 1, 7],
        [1, 1, 1, 6],
    ]


def test_without_chunked_prefill_prompts_stay_whole() -> None:
    harness = Harness(
        rules=QUIET, config={"enable_chunked_prefill": False, "max_num_batched_tokens": 20}
    )
    for length in (12, 12, 6):
        harness.add([3] * length, 1)
    long = harness.add([5] * 50, 1)  # longer than any step: cut, or it would never run
    harness.run()
    lengths = [record.lengths for record in harness.loaded.records]
    assert lengths == [[12], [12, 6], [20], [20], [10]]
    harness.check_output(long)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 9),
    logit_rows=st.integers(1, 9),
)
def test_no_step_exceeds_its_budget_and_all_end(
    lengths: list[int], budget: int, seqs: int, logit_rows: int
) -> None:
    harness = Harness(
        rules=QUIET,
        config={"max_num_batched_tokens": budget, "max_num_seqs": seqs},
        model={"max_tokens": 64, "max_logit_rows": logit_rows},
    )
    for index, length in enumerate(lengths):
        wanted = {"prompt_logprobs": 0} if index % 3 == 0 else {}
        harness.add([index] * length, 7, params=wanted)
    harness.run()
    for record in harness.loaded.records:
        assert sum(record.lengths) <= budget
        assert len(record.lengths) <= seqs
        assert record.num_logit_rows <= logit_rows
    harness.check_outputs()


@pytest.mark.parametrize(("asked", "most"), [(None, 3), (2, 2), (5, 5)])
def test_the_backend_says_how_many_run_together_unless_the_user_does(
    asked: int | None, most: int
) -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": asked}, model={"max_num_seqs": 3})
    for index in range(8):
        harness.add([index] * 4, 5)
    harness.run()
    assert max(len(record.lengths) for record in harness.loaded.records) == most


def test_the_newest_of_the_lowest_priority_is_preempted() -> None:
    harness = Harness(rules=QUIET, model={"num_blocks": 9})
    old = harness.add([1] * 10, 40, priority=1)
    important = harness.add([2] * 10, 40, priority=0)
    new = harness.add([3] * 10, 40, priority=1)
    scheduler = harness.core._scheduler
    while not scheduler.num_preemptions:
        harness.step()
    assert {sequence.request_id for sequence in scheduler.running} == {old, important}
    while scheduler.num_preemptions < 2:
        harness.step()
    assert {sequence.request_id for sequence in scheduler.running} == {important}
    harness.run()
    assert list(harness.last) == [important, old, new]
    harness.check_outputs()


def test_a_higher_priority_takes_the_row_of_a_running_sequence() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 2})
    slow = [harness.add([index] * 20, 30, priority=1) for index in range(3)]
    for _ in range(5):
        harness.step()
    urgent = [harness.add([9 + index] * 5, 3, priority=0) for index in range(3)]
    harness.step()  # one way is made in each step
    harness.step()
    running = {sequence.request_id for sequence in harness.core._scheduler.running}
    assert running == {urgent[0], urgent[1]}
    harness.run()
    assert harness.core.stats().num_preemptions == 2
    assert list(harness.last) == [*urgent, *slow]
    assert [harness.first[name].num_cached_tokens for name in slow[:2]] == [0, 0]
    harness.check_outputs()
    harness.check_idle()


def test_a_higher_priority_takes_the_blocks_of_running_sequences() -> None:
    harness = Harness(rules=QUIET, model={"num_blocks": 10})
    old, new = (harness.add([index] * 30, 10, priority=1) for index in range(2))
    for _ in range(5):
        harness.step()
    urgent = harness.add([9] * 30, 3)
    harness.step()
    running = {sequence.request_id for sequence in harness.core._scheduler.running}
    assert running == {old, urgent}
    harness.run()
    assert list(harness.last) == [urgent, old, new]
    assert harness.core.stats().num_preemptions == 1
    harness.check_outputs()
    harness.check_idle()


def test_nobody_is_preempted_in_vain() -> None:
    harness = Harness(rules=QUIET, model={"num_blocks": 8})
    equal = harness.add([1] * 30, 20, priority=0)
    lower = harness.add([2] * 5, 20, priority=1)
    for _ in range(5):
        harness.step()
    urgent = harness.add([3] * 40, 3, priority=0)  # not without the blocks of its equal
    for _ in range(5):
        harness.step()
    assert harness.core.stats().num_preemptions == 0
    harness.run()
    assert set(harness.last) == {equal, lower, urgent}
    harness.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equals_take_nothing_from_each_other(policy: str) -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 2, "scheduling_policy": policy})
    for index in range(6):
        priority = -index if policy == "fcfs" else 0
        harness.add([index] * 9, 9, priority=priority, client=f"c{index}")
        harness.step()
    harness.run()
    assert harness.core.stats().num_preemptions == 0


def test_nobody_is_admitted_only_to_be_preempted() -> None:
    harness = Harness(rules=QUIET, model={"num_blocks": 5})
    harness.add([1] * 10, 20)
    for _ in range(3):
        harness.step()
    harness.add([2] * 24, 10)  # needs the three free blocks, of which the other soon needs one
    harness.run()
    assert harness.core.stats().num_preemptions == 0
    harness.check_outputs()


def test_low_priority_is_not_starved_by_fair_traffic() -> None:
    """Requests keep coming from ten clients; each one is served within a few turns."""
    harness = Harness(rules=QUIET, config={"max_num_seqs": 2})
    waiting_since: dict[str, int] = {}
    for turn in range(300):
        if turn % 4 == 0:
            name = harness.add([turn % 40] * 5, 4, client=f"c{turn // 4 % 10}")
            waiting_since[name] = turn
        harness.step()
        for name in list(waiting_since):
            if name in harness.first:
                assert turn - waiting_since.pop(name) < 40
            else:
                assert turn - waiting_since[name] < 40
    harness.run()
    harness.check_outputs()


def test_long_prompts_do_not_break_the_pace_of_running_decodes() -> None:
    """Simulated device: 20 us a token, 500 us a step; target 2.5 ms, so about 90 prompt tokens."""
    harness = Harness(
        rules=QUIET,
        model={
            "num_blocks": 2000,
            "max_tokens": 1000,
            "max_logit_rows": 64,
            "step_s": 500e-6,
            "token_s": 20e-6,
        },
        config={"target_itl": "2.5", "enable_prefix_caching": False},
        max_model_len=2100,
    )
    harness.add([1] * 8, 400)
    for _ in range(6):
        harness.step()
    before = len(harness.loaded.records)
    long = harness.add([2] * 2000, 2)
    while long not in harness.last:
        harness.step()
    mixed = [sum(r.lengths) for r in harness.loaded.records[before:] if max(r.lengths) > 1]
    assert max(mixed) <= 102, "a step took longer than its target"
    assert statistics.median(mixed) >= 80, "prefill was held back without need"


def test_prefill_makes_progress_when_decodes_alone_miss_the_target() -> None:
    harness = Harness(
        rules=QUIET, model={"step_s": 1e-3}, config={"target_itl": "0.5"}, max_model_len=64
    )
    harness.add([1] * 8, 50)
    for _ in range(4):
        harness.step()
    before = len(harness.loaded.records)
    harness.add([2] * 40, 2)
    for _ in range(12):
        harness.step()
    steps = [record.lengths for record in harness.loaded.records[before:]]
    assert all(len(lengths) > 1 for lengths in steps[:3]), "a step computed no part of the prompt"
    chunks = [lengths[1] for lengths in steps if len(lengths) > 1 and lengths[1] > 1]
    assert sum(chunks) == 40
    assert min(chunks[:-1]) >= 4


def test_late_results_do_not_touch_the_next_owner_of_a_row() -> None:
    """A ends while it is in flight once more; B takes its row; then A's result comes in, and C,
    which has B's prompt, must not find blocks that B has not computed yet."""
    rules = FakeRules(VOCAB_SIZE, eos_id=7, eos_every=34)
    harness = Harness(rules=rules, config={"max_num_batched_tokens": 16, "max_num_seqs": 2})
    first = harness.add([1] * 30, 20)
    while first not in harness.last:
        harness.step()
    assert harness.core.stats().num_running == 0
    harness.add([2] * 50, 2)
    harness.step()
    assert harness.core._scheduler.running[0].row == 0
    harness.add([2] * 50, 2, priority=-1)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_reserved_rows_wait_for_better_priorities() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 4, "priority_reserve": 0.5})
    for index in range(4):
        harness.add([index] * 9, 9)
    harness.step()
    assert harness.core.stats().num_running == 2
    urgent = [harness.add([10 + index] * 9, 4, priority=-1) for index in range(2)]
    lower = harness.add([20] * 9, 4, priority=3)
    harness.step()
    harness.step()
    assert set(urgent) < set(harness.first)
    assert lower not in harness.first
    harness.run()
    assert harness.core.stats().num_preemptions == 0
    harness.check_outputs()
    harness.check_idle()


def test_nobody_is_preempted_for_one_that_reserved_rows_keep_out() -> None:
    harness = Harness(rules=QUIET, config={"max_num_seqs": 8, "priority_reserve": 0.5})
    for index in range(2):
        harness.add([index] * 9, 30, priority=5)
    harness.step()
    for index in range(4):
        harness.add([10 + index] * 9, 40, priority=-1)
    for _ in range(3):
        harness.step()
    harness.add([30] * 9, 5)
    for _ in range(4):
        harness.step()
    assert harness.core.stats().num_preemptions == 0
    assert harness.core.stats().num_running == 6


def test_a_turn_of_another_priority_does_not_hold_urgent_ones_up() -> None:
    """Each 16th admission is of another priority, which may take a reserved row then."""
    harness = Harness(rules=QUIET, config={"max_num_seqs": 4, "priority_reserve": 0.5})
    for index in range(4):
        harness.add([index] * 4, 58)
    harness.step()
    urgent = [harness.add([10 + index % 30] * 3, 2, priority=-1) for index in range(80)]
    stalled = 0
    while not set(urgent) <= set(harness.last):
        before = len(harness.first)
        harness.step()
        has_room = harness.core.stats().num_running < 3
        stalled = stalled + 1 if has_room and len(harness.first) == before else 0
        assert stalled < 5
    harness.run()
    harness.check_outputs()


def test_reserved_blocks_wait_for_better_priorities() -> None:
    config = {"priority_reserve": 0.5, "enable_prefix_caching": False}
    harness = Harness(rules=QUIET, model={"num_blocks": 14}, config=config)
    first, second = (harness.add([index] * 30, 8) for index in range(2))  # four blocks, then five
    harness.step()
    assert harness.core.stats().num_running == 1, "the second would begin on reserved blocks"
    urgent = harness.add([5] * 30, 8, priority=-1)
    for _ in range(4):
        harness.step()
    assert urgent in harness.first
    assert second not in harness.first
    harness.run()
    large = harness.add([7] * 58, 6)  # eight blocks: alone it may have them all
    harness.run()
    assert {first, second, urgent, large} == set(harness.last)
    assert harness.core.stats().num_preemptions == 0
    harness.check_outputs()


def test_no_reserve_without_priorities() -> None:
    config = {"max_num_seqs": 4, "priority_reserve": 0.5, "scheduling_policy": "fcfs"}
    harness = Harness(rules=QUIET, config=config)
    for index in range(4):
        harness.add([index] * 9, 9)
    harness.step()
    assert harness.core.stats().num_running == 4
