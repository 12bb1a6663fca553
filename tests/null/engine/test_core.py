"""The engine core end to end over the fake model: outputs, overlap, caches, rules on logits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllmx_engine.core import commit, sequence
from vllmx_engine.core.logit_rules import LogitRules
from vllmx_engine.wire.messages import STEP_TOKENS, CoreOutput, is_piece
from vllmx_testing.fake import FakeError, FakeRules, FakeStep

from .harness import EOS, QUIET, RULES, VOCAB_SIZE, Harness, prompts


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"model": {"num_blocks": 9}},
        {"model": {"max_tokens": 9}},
        {"config": {"max_num_batched_tokens": 5, "max_num_seqs": 3}},
        {"config": {"enable_prefix_caching": False}},
        {"config": {"enable_chunked_prefill": False}},
        {"config": {"scheduling_policy": "fcfs"}},
    ],
    ids=str,
)
def test_outputs_are_those_of_the_model(overlap: bool, variant: dict[str, Any]) -> None:
    config = {"async_scheduling": overlap} | variant.get("config", {})
    harness = Harness(model=variant.get("model", {}), config=config)
    for index, prompt in enumerate(prompts(24)):
        params = {"temperature": 1.0, "top_p": 0.5} if index % 2 else {}
        harness.add(prompt, 1 + index % 13, params=params, client=f"c{index % 3}")
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_tiny_cache_preempts_and_sends_nothing_twice() -> None:
    harness = Harness(model={"num_blocks": 10}, rules=QUIET)
    for prompt in prompts(6, longest=12):
        harness.add(prompt, 40)
    harness.run()
    assert harness.core.stats().num_preemptions > 0
    harness.check_outputs()
    harness.check_idle()


def test_tokens_that_nobody_looks_at_come_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_MOST_HELD", 16)
    harness = Harness(model={"num_blocks": 10}, rules=QUIET)
    for prompt in prompts(6, longest=12):
        harness.add(prompt, 40, at_end=True)
    detailed = harness.add([1, 2, 3], 40, at_end=True, params={"logprobs": 1})
    sizes: dict[str, list[int]] = {name: [] for name in harness.requests}
    while harness.core.has_work:
        for output in harness.step():
            sizes[output.request_id].append(len(output.ids))
    assert harness.core.stats().num_preemptions > 0
    assert harness.core.stats().generation_tokens == 7 * 40
    assert sizes.pop(detailed) == [1] * 40
    assert all(each == [16, 16, 8] for each in sizes.values())
    harness.check_outputs()
    harness.check_idle()


def test_a_decode_step_is_launched_before_the_last_ids_are_read() -> None:
    harness = Harness(rules=QUIET)
    harness.add([1, 2, 3], 6)
    assert harness.step() == []  # launched, not yet read
    assert [output.ids for output in harness.step()] == [harness.expected("r0")[:1]]
    assert harness.loaded.num_steps == 2
    harness.run()
    assert harness.loaded.num_steps == 6  # a known length costs no wasted step
    harness.check_outputs()


def test_plain_twin_reads_what_it_launched() -> None:
    harness = Harness(rules=QUIET, config={"async_scheduling": False})
    harness.add([1, 2, 3], 2)
    assert [output.ids for output in harness.step()] == [harness.expected("r0")[:1]]
    harness.run()
    harness.check_outputs()


def test_a_stop_id_wastes_one_row_at_most() -> None:
    rules = FakeRules(vocab_size=VOCAB_SIZE, eos_id=EOS, eos_every=10)
    harness = Harness(rules=rules)
    name = harness.add([1, 2, 3], 30)
    harness.run()
    assert harness.ids[name][-1] == EOS
    assert len(harness.ids[name]) == 8
    assert harness.loaded.num_steps == 9
    harness.check_outputs()


def test_prefill_and_decode_share_a_step() -> None:
    harness = Harness(rules=QUIET)
    harness.add([1, 2, 3], 20)
    for _ in range(3):
        harness.step()
    harness.add(list(range(20)), 2)
    harness.step()
    assert harness.loaded.records[-1].lengths == [1, 20]
    harness.run()
    harness.check_outputs()


def test_repeated_prompts_come_from_the_cache() -> None:
    harness = Harness(rules=QUIET)
    prompt = list(range(24))
    first = harness.add(prompt, 3)
    harness.run()
    second, salted = harness.add(prompt, 3), harness.add(prompt, 3, cache_salt="other")
    longer = harness.add([*prompt, 1, 2], 3)
    harness.run()
    cached = {name: output.num_cached_tokens for name, output in harness.first.items()}
    assert cached == {first: 0, second: 16, salted: 0, longer: 24}
    stats = harness.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (98, 40)
    assert (stats.prompt_tokens, stats.generation_tokens) == (98, 12)
    harness.check_outputs()


def test_generated_blocks_are_cached_too() -> None:
    harness = Harness(rules=QUIET)
    first = harness.add([1, 2, 3, 4], 21)
    harness.run()
    second = harness.add([1, 2, 3, 4, *harness.ids[first]], 2)
    harness.run()
    assert harness.first[second].num_cached_tokens == 24
    harness.check_outputs()


def test_reset_prefix_cache() -> None:
    harness = Harness(rules=QUIET)
    harness.add(list(range(20)), 3)
    harness.step()
    assert not harness.core.reset_prefix_cache()
    harness.run()
    assert harness.core.stats().num_cached_blocks > 0
    assert harness.core.reset_prefix_cache()
    assert harness.core.stats().num_cached_blocks == 0
    name = harness.add(list(range(20)), 3)
    harness.run()
    assert harness.first[name].num_cached_tokens == 0


def test_choices_of_one_call_share_the_prompt() -> None:
    harness = Harness(rules=QUIET, config={"max_num_batched_tokens": 16})
    prompt = list(range(40))
    leader = harness.add(prompt, 4)
    params = {"temperature": 1.0}
    followers = [harness.add(prompt, 4, leader=leader, params=params) for _ in range(3)]
    harness.run()
    assert [harness.first[name].num_cached_tokens for name in followers] == [32] * 3
    assert harness.loaded.num_tokens == 40 + 3 * 8 + 4 * 3
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("moment", range(5))
def test_followers_go_on_without_their_leader(moment: int) -> None:
    harness = Harness(rules=QUIET, config={"max_num_batched_tokens": 16})
    leader = harness.add(list(range(40)), 4)
    harness.add(list(range(40)), 4, leader=leader)
    harness.add(list(range(40)), 4, leader="unknown")
    harness.add(list(range(40)), 4, name="own", leader="own")
    for _ in range(moment):
        harness.step()
    harness.abort(leader)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


# --- sampling fields ------------------------------------------------------------------------------
def test_min_tokens_bans_stop_ids() -> None:
    rules = FakeRules(vocab_size=VOCAB_SIZE, eos_id=EOS, eos_every=5)
    harness = Harness(rules=rules)
    name = harness.add([1, 2, 3], 30, params={"min_tokens": 9})
    harness.run()
    assert len(harness.ids[name]) == 13
    assert EOS not in harness.ids[name][:9]
    harness.check_outputs()


def test_no_edit_leaves_the_vocabulary() -> None:
    """A backend would write there."""
    harness = Harness(rules=QUIET)
    stops, words = [-1, 3, VOCAB_SIZE], [[-1], [2, -1], [VOCAB_SIZE], [4]]
    name = harness.add([1, 2], 6, params={"min_tokens": 6}, stop_ids=stops, bad_words_ids=words)
    sequence = harness.core._scheduler.live[name]
    assert sequence.rules is not None
    ids, _ = sequence.rules.edits(sequence.tokens, 0)
    assert sorted(ids) == [3, 4]
    assert not sequence.rules.phrases
    harness.run()
    assert len(harness.ids[name]) == 6


@pytest.mark.parametrize("overlap", [True, False])
def test_rules_on_logits(overlap: bool) -> None:
    harness = Harness(rules=RULES, config={"async_scheduling": overlap})
    everything = list(range(VOCAB_SIZE))
    harness.add([1, 2], 12, params={"logit_bias": {5: -100.0, 6: 60.0}})
    harness.add([1, 2], 12, params={"allowed_token_ids": (3, 9, 31, 32, 47)})
    harness.add([1, 2], 12, params={"frequency_penalty": 0.5})
    harness.add([1, 2, 2], 12, params={"repetition_penalty": 1.5, "presence_penalty": -1.0})
    harness.add([1, 2], 12, bad_words_ids=[[token] for token in everything[:40]])
    harness.add([1, 2], 12, bad_words_ids=[[a, b] for a in everything[:24] for b in range(9)])
    harness.add([1, 2], 12, params={"logprobs": 3, "prompt_logprobs": 2, "min_tokens": 12})
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_bad_words_hold_no_row_back() -> None:
    """The row whose edits need its last token decodes in every step, as the other one does; only
    the steps that it is in are launched in halves."""
    harness = Harness(rules=QUIET)
    edited = harness.add([1, 2, 3], 8, bad_words_ids=[[1, 2], [3, 4, 5]])
    plain = harness.add([4, 5, 6], 12)
    while edited not in harness.last:
        harness.step()
    assert len(harness.ids[plain]) == len(harness.ids[edited]) == 8
    halves = harness.loaded.num_forwards
    assert halves >= 6, "steps in halves"
    harness.run()
    assert harness.loaded.num_forwards <= halves + 1, "nobody waits any more"
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("when", ["forward", "result of the step before", "edits", "sample"])
def test_a_step_in_halves_that_fails_takes_its_own_requests_along(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(rules=QUIET, model={"fail_steps": [4]} if when.startswith("result") else {})
    edited = harness.add([1, 2, 3], 12, bad_words_ids=[[1, 2], [3, 4, 5]])
    for _ in range(4):
        harness.step()
    waiting = harness.add([7, 8], 6)

    def fail(*arguments: object) -> None:
        monkeypatch.undo()
        raise FakeError("as the test ordered")

    if when == "forward":
        harness.loaded.refuse_steps.add(harness.loaded.num_steps)
    elif when == "edits":
        monkeypatch.setattr(LogitRules, "edits", fail)
    elif when == "sample":
        monkeypatch.setattr(FakeStep, "draw", fail)
    harness.run()
    assert harness.last[edited].finish_reason == "error"
    late = harness.add([5, 6], 6, bad_words_ids=[[1, 2]])
    harness.run()
    assert harness.last[late].finish_reason == "length"
    assert waiting in harness.last
    harness.check_idle()


@pytest.mark.parametrize("num_blocks", [64, 7])
@pytest.mark.parametrize("max_logit_rows", [5, 32])
def test_prompt_logprobs_are_cut_to_the_logit_rows(max_logit_rows: int, num_blocks: int) -> None:
    harness = Harness(
        rules=QUIET, model={"max_logit_rows": max_logit_rows, "num_blocks": num_blocks}
    )
    for index, prompt in enumerate(prompts(6, longest=40)):
        params = {"prompt_logprobs": index % 4, "logprobs": 1} if index % 3 < 2 else {}
        harness.add(prompt, 10, params=params)
    harness.run()
    assert max(record.num_logit_rows for record in harness.loaded.records) <= max_logit_rows
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_prompt_logprobs_come_in_small_pieces(
    num_logprobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_PIECE_LOGPROBS", 8)
    harness = Harness(rules=QUIET)
    name = harness.add([1] * 30, 3, params={"prompt_logprobs": num_logprobs})
    outputs: list[CoreOutput] = []
    while harness.core.has_work:
        outputs += harness.step()
    pieces = [len(output.prompt_logprobs or []) for output in outputs if is_piece(output)]
    size = 8 // (num_logprobs + 1)
    assert pieces[:-1] == [size] * (29 // size)
    assert sum(pieces) == 29
    assert [output.ids for output in outputs[: len(pieces)]] == [[]] * len(pieces)
    harness.check_output(name)


def test_the_wait_of_a_request_comes_with_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    harness = Harness(rules=QUIET, config={"max_num_seqs": 1})
    names = [harness.add([index] * 4, 6) for index in range(3)]
    names.append(harness.add([3] * 4, 6, at_end=True))
    outputs: dict[str, list[float | None]] = {name: [] for name in names}
    held_s = 0.0
    while harness.core.has_work:
        now_s += 1.0
        for output in harness.step():
            outputs[output.request_id].append(output.queue_s)
            held_s += output.held_s
    waits = [outputs[name][0] or 0.0 for name in names]
    assert 0 < waits[0] < waits[1] < waits[2] < waits[3]
    assert outputs.pop(names[3]) == [waits[3]]
    assert held_s == 5.0  # with its first token at the end
    assert all(later == [None] * 5 for _, *later in outputs.values())


def test_steps_are_counted_by_their_tokens() -> None:
    harness = Harness(rules=QUIET)
    harness.add([1] * 20, 4)
    harness.run()
    stats = harness.core.stats()
    counts = dict(zip((*STEP_TOKENS, None), stats.step_sizes, strict=True))
    assert counts == {bound: {1: 3, 32: 1}.get(bound or 0, 0) for bound in counts}
    assert stats.prompt_tokens + stats.generation_tokens == (20 + 1) + 3


def test_a_prompt_in_chunks_counts_in_the_step_that_reads_its_end() -> None:
    harness = Harness(rules=QUIET, config={"max_num_batched_tokens": 16})
    harness.add([1] * 40, 2)
    harness.run()
    counts = dict(zip((*STEP_TOKENS, None), harness.core.stats().step_sizes, strict=True))
    assert counts == {bound: {1: 1, 64: 1}.get(bound or 0, 0) for bound in counts}
