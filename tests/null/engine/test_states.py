"""States of recurrent layers: slots, snapshots, and who finds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_engine.core.state_slots import SlotPool
from vllmx_testing.fake import FakeRules

from .harness import QUIET, Harness

STATES = replace(QUIET, has_states=True)
SIZE = 8
SYSTEM = list(range(5, 38))
"""33 tokens: four whole blocks and one token."""


def harness(rules: FakeRules = STATES, **config: Any) -> Harness:
    """A harness in which every snapshot is worth its slot, unless the configuration says
    otherwise."""
    return Harness(config={"state_snapshot_tokens": 1} | config, rules=rules, max_model_len=512)


def ask(engine: Harness, prompt: list[int], max_tokens: int = 4, **fields: Any) -> int:
    """Runs a request to its end; returns how many of its tokens came from the cache."""
    name = engine.add(prompt, max_tokens, **fields)
    engine.run()
    engine.check_output(name)
    return engine.first[name].num_cached_tokens


# --- the pool -----------------------------------------------------------------------------------
def entry(number: int) -> tuple[bytes, bytes, bytes]:
    return bytes([number]), b"", b""


def filed(pool: SlotPool, number: int, *, is_far: bool = False) -> int:
    """A slot with an idle snapshot."""
    slot = pool.take(any_snapshot=True)
    pool.file(slot, entry(number), is_far=is_far)
    pool.release(slot)
    return slot


def test_the_snapshot_that_was_used_least_recently_is_evicted() -> None:
    pool = SlotPool(3)
    slots = [filed(pool, number) for number in range(3)]
    pool.acquire(slots[0])
    pool.release(slots[0])
    assert [pool.take(any_snapshot=False) for _ in range(4)] == [slots[1], slots[2], slots[0], -1]
    assert pool.num_snapshots == 0
    pool.check(slots)


def test_near_snapshots_go_first_and_take_no_far_ones_place() -> None:
    pool = SlotPool(2)
    far, near = filed(pool, 0, is_far=True), filed(pool, 1)
    assert pool.take(any_snapshot=False) == near
    assert pool.take(any_snapshot=False) == -1
    assert pool.take(any_snapshot=True) == far


def test_a_snapshot_in_use_stays_until_it_was_read() -> None:
    pool = SlotPool(2)
    read = filed(pool, 0)
    pool.acquire(read)
    other = pool.take(any_snapshot=True)
    assert pool.take(any_snapshot=True) == -1
    pool.forget(entry(0)[0])
    assert pool.find(entry(0)[0]) is None
    assert pool.take(any_snapshot=True) == -1, "forgotten, but still to be read"
    pool.release(read)
    pool.check([other])
    assert pool.take(any_snapshot=True) == read


def test_the_first_snapshot_of_a_prefix_stays() -> None:
    pool = SlotPool(2)
    first, second = filed(pool, 0), pool.take(any_snapshot=True)
    assert pool.file(second, entry(0), is_far=True) is None
    pool.release(second)
    found = pool.find(entry(0)[0])
    assert found is not None
    assert found.slot == first
    pool.clear()
    pool.check([])
    assert (pool.num_available, pool.num_snapshots) == (2, 0)


# --- who finds them -----------------------------------------------------------------------------
def test_the_same_prompt_again_begins_behind_its_last_block() -> None:
    engine = harness()
    assert [ask(engine, SYSTEM) for _ in range(3)] == [0, 32, 32]


def test_a_second_turn_begins_less_than_a_block_behind_the_answer() -> None:
    engine, prompt = harness(), SYSTEM[:12]
    for turn, cached in enumerate([0, 32, 48]):
        assert ask(engine, prompt, 21) == cached, turn
        prompt = prompt + engine.ids[f"r{turn}"] + [40 + turn, 41]
    # 12 + 21 tokens, of which the last was never fed: 32 lie in whole blocks, then 48 of 35 + 20


def test_a_shared_system_prompt_is_hit_by_the_third_who_brings_it() -> None:
    """The second finds its blocks and no states: it leaves them there."""
    engine = harness()
    asked = [[*SYSTEM, 40 + number, *range(20)] for number in range(4)]
    assert [ask(engine, prompt) for prompt in asked] == [0, 0, 32, 32]


def test_choices_of_one_call_share_the_states_of_their_prompt() -> None:
    """However little they save: the others wait for the first one's prompt in any case."""
    engine = harness(state_snapshot_tokens=1000)
    leader = engine.add(SYSTEM[:20], 6)
    others = [engine.add(SYSTEM[:20], 6, leader=leader) for _ in range(3)]
    engine.run()
    engine.check_outputs()
    assert [engine.first[name].num_cached_tokens for name in others] == [16, 16, 16]


def test_salts_set_states_apart() -> None:
    engine = harness()
    cached = [ask(engine, SYSTEM, cache_salt=salt) for salt in ("", "a", "a", "")]
    assert cached == [0, 0, 32, 32]


def test_scored_prompts_begin_with_known_log_probabilities() -> None:
    engine = harness()
    scored = {"prompt_logprobs": 1}
    assert [ask(engine, SYSTEM, params=p) for p in ({}, scored, {}, scored)] == [0, 0, 32, 32]
    engine.check_outputs()


@pytest.mark.parametrize("windows", [(10,), (None, 10), (None, None, 20)])
def test_hits_need_blocks_and_states_alike(windows: tuple[int | None, ...]) -> None:
    engine = harness(replace(STATES, windows=windows))
    assert [ask(engine, SYSTEM) for _ in range(2)] == [0, 32]
    scheduler = engine.core._scheduler
    assert scheduler.states is not None
    engine.add(SYSTEM, 2, name="again")
    digests, group = scheduler.live["again"].digests, len(windows) - 1
    assert scheduler.prefixes.look(scheduler.live["again"]).num_blocks == 4
    scheduler.pool.forget_idle(scheduler.cache.block_of(digests[3], group))
    assert scheduler.states.pool.find(digests[3]) is None, "states without a block to go with"
    assert scheduler.prefixes.look(scheduler.live["again"]).num_blocks == 0
    engine.run()
    engine.check_outputs()


def test_without_a_prefix_cache_rows_stay_in_their_slots() -> None:
    engine = harness(enable_prefix_caching=False)
    assert [ask(engine, SYSTEM, 20) for _ in range(2)] == [0, 0]
    assert engine.core.stats().num_snapshots == 0
    assert engine.loaded.records[0].lengths == [32], "no chunk ends early"


def test_a_reset_forgets_states_too() -> None:
    engine = harness()
    ask(engine, SYSTEM)
    assert engine.core.stats().num_snapshots > 0
    assert engine.core.reset_prefix_cache()
    assert engine.core.stats().num_snapshots == 0
    assert ask(engine, SYSTEM) == 0


# --- where they are taken -----------------------------------------------------------------------
def test_a_prompt_is_cut_for_a_snapshot_that_saves_enough() -> None:
    engine = harness(state_snapshot_tokens=16)
    ask(engine, SYSTEM[:15], 2)
    assert [record.lengths for record in engine.loaded.records[:2]] == [[15], [1]]
    engine.loaded.records.clear()
    ask(engine, list(range(20)), 2)
    assert [record.lengths for record in engine.loaded.records[:2]] == [[16], [4]]


def test_a_row_leaves_no_more_than_one_snapshot_as_it_passes_blocks() -> None:
    engine = harness()
    ask(engine, SYSTEM[:12], 60)
    assert engine.core.stats().num_snapshots == 2, "behind the prompt's last block and the answer's"


def test_a_passed_snapshot_stays_where_another_sequence_began_with_it() -> None:
    engine = harness()
    long = engine.add(SYSTEM[:12], 60)
    while len(engine.ids[long]) < 24:
        engine.step()
    branch = SYSTEM[:12] + engine.ids[long][:21]
    other = engine.add([*branch, 1, 2], 2)
    engine.run()
    engine.check_outputs()
    assert engine.first[other].num_cached_tokens == 32
    assert ask(engine, [*branch, 3, 4]) == 32


# --- few slots, and what goes wrong -------------------------------------------------------------
@pytest.mark.parametrize("slots", [4, 5, 6])
def test_rows_come_first_where_slots_are_few(slots: int) -> None:
    engine = Harness(
        {"num_state_slots": slots}, {"max_num_seqs": 4, "state_snapshot_tokens": 1}, STATES
    )
    for _ in range(3):
        for number in range(6):
            engine.add([*SYSTEM[:17], number, *range(number)], 20)
        engine.run()
    engine.check_outputs()
    engine.check_idle()
    most = max(len(record.lengths) for record in engine.loaded.records)
    assert most == 4, "as many rows as slots allow"


def test_the_last_slot_is_the_one_that_a_row_begins_with() -> None:
    """One slot for one sequence: who finds states in it goes on there."""
    engine = Harness(
        {"num_state_slots": 2}, {"max_num_seqs": 2, "state_snapshot_tokens": 1}, STATES
    )
    first = engine.add(SYSTEM, 2)
    engine.run()
    assert engine.core.stats().num_snapshots == 1
    busy = engine.add([1, 2, 3], 30)
    engine.step()
    second = engine.add(SYSTEM, 2)
    engine.run()
    engine.check_outputs()
    assert engine.first[second].num_cached_tokens == 32, (first, busy)


def test_a_preempted_sequence_goes_on_behind_its_last_block() -> None:
    engine = Harness({"num_blocks": 9}, {"max_num_seqs": 2, "state_snapshot_tokens": 1}, STATES)
    engine.add(list(range(20)), 30)
    engine.add(list(range(20, 40)), 30, client="b")
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    again = sum(sum(record.lengths) for record in engine.loaded.records) - 2 * 49
    assert again < 30, "more than the tokens behind a block were computed again"


def test_an_aborted_prompt_leaves_the_states_of_its_chunks() -> None:
    engine = Harness({"max_tokens": 16}, {"state_snapshot_tokens": 1}, STATES, max_model_len=512)
    prompt = [number % 40 for number in range(100)]
    name = engine.add(prompt, 2)
    for _ in range(5):
        engine.step()
    engine.abort(name)
    engine.run()
    assert ask(engine, prompt) >= 32


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_states_of_a_broken_step_are_not_found(overlap: bool, failing: int) -> None:
    """Nor those that its sequences left before."""
    engine = harness(async_scheduling=overlap)
    engine.num_faults = 1
    engine.loaded.fail_steps = frozenset({failing})
    engine.add(SYSTEM, 4)
    engine.run()
    assert engine.core.stats().num_snapshots == 0
    assert ask(engine, SYSTEM) == 0


def test_a_row_that_comes_to_nan_takes_its_states_along() -> None:
    engine = harness(replace(STATES, nan_token=39))
    assert ask(engine, SYSTEM) == 0
    keeper = engine.add(SYSTEM, 400, params={"logit_bias": {1: 100.0}})
    broken = engine.add([*SYSTEM, *range(20), 39], 4)
    while broken not in engine.last:
        engine.step()
    assert engine.last[broken].error_code == "non_finite_logits"
    other = engine.add([*SYSTEM, *range(20)], 2)
    while other not in engine.last:
        engine.step()
    assert engine.first[other].num_cached_tokens == 32, "what it began with is another's"
    assert keeper not in engine.last


def test_snapshots_that_save_little_leave_the_others_alone() -> None:
    engine = Harness(
        {"num_state_slots": 3, "num_blocks": 256},
        {"max_num_seqs": 1, "state_snapshot_tokens": 64},
        STATES,
        max_model_len=512,
    )
    long = [number % 40 for number in range(100)]
    assert ask(engine, long, 2) == 0
    for number in range(8):
        ask(engine, [number] * 30, 30)
    assert ask(engine, long, 2) == 96
