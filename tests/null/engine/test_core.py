"""The engine core end to end over the fake model: outputs, ends, errors, overlap."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from vllmx_core.errors import EngineDeadError
from vllmx_core.testing.fake import FakeError, FakeRules

from .harness import EOS, MAX_MODEL_LEN, RULES, VOCAB_SIZE, Harness

QUIET = FakeRules(vocab_size=VOCAB_SIZE)


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


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


def test_bad_words_slow_down_their_own_row_only() -> None:
    harness = Harness(rules=QUIET)
    slow = harness.add([1, 2, 3], 8, bad_words_ids=[[1, 2], [3, 4, 5]])
    fast = harness.add([4, 5, 6], 8)
    counts = {slow: 0, fast: 0}
    while fast not in harness.last:
        harness.step()
        counts = {name: len(ids) for name, ids in harness.ids.items()}
    assert counts == {slow: 4, fast: 8}
    harness.run()
    harness.check_outputs()


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


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    harness = Harness(rules=QUIET)
    harness.add(list(range(24)), 2)
    harness.run()
    name = harness.add(list(range(24)), 2, params={"prompt_logprobs": 0})
    harness.run()
    assert harness.first[name].num_cached_tokens == 0
    harness.check_outputs()


# --- ends and errors ------------------------------------------------------------------------------
def test_context_end_is_length() -> None:
    harness = Harness(rules=QUIET, max_model_len=20)
    name = harness.add(list(range(15)), 50)
    harness.run()
    assert len(harness.ids[name]) == 5
    harness.check_outputs()


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "words"),
    [
        ([], {}, "invalid_request", "at least one"),
        ([1, VOCAB_SIZE], {}, "invalid_request", f"0 to {VOCAB_SIZE - 1}"),
        ([1, -1], {}, "invalid_request", "got -1"),
        ([1 << 40], {}, "invalid_request", "got"),
        ([1] * MAX_MODEL_LEN, {}, "context_length_exceeded", f"holds {MAX_MODEL_LEN - 1}"),
        ([1], {"params": {"stop_token_ids": (99,)}}, "invalid_request", "99"),
        ([1, 2.5], {}, "invalid_request", "got 2.5"),
        (["1"], {}, "invalid_request", "got '1'"),
        ([1], {"seed": -1}, "invalid_request", "-1"),
        (
            [1],
            {
                "params": {"allowed_token_ids": (3, 4), "min_tokens": 1},
                "stop_ids": [3],
                "bad_words_ids": [[4]],
            },
            "invalid_request",
            "allowed_token_ids",
        ),
    ],
)
def test_bad_requests_end_alone(
    prompt: list[Any], fields: dict[str, Any], code: str, words: str
) -> None:
    harness = Harness()
    good = harness.add([1, 2, 3])
    bad = harness.add(prompt, **fields)
    harness.run()
    assert (harness.last[bad].finish_reason, harness.last[bad].error_code) == ("error", code)
    assert words in (harness.last[bad].error or "")
    harness.check_output(good)
    harness.check_idle()


def test_a_prompt_beyond_all_blocks_says_so() -> None:
    harness = Harness(model={"num_blocks": 4})
    name = harness.add([1] * 32)
    harness.run()
    assert harness.last[name].error_code == "out_of_capacity"
    assert "--num-kv-blocks" in (harness.last[name].error or "")


def test_a_request_id_in_use_is_refused() -> None:
    harness = Harness(rules=QUIET)
    harness.add([1, 2, 3], 4, name="same")
    harness.core.add(harness.requests["same"])
    outputs = [harness.core.step(), harness.core.step(), harness.core.step()]
    assert [output.error_code for output in outputs[0]] == ["invalid_request"]
    assert [output.ids for output in outputs[1]] == [harness.expected("same")[:1]]


@pytest.mark.parametrize("overlap", [True, False])
def test_non_finite_logits_end_one_request(overlap: bool) -> None:
    rules = FakeRules(vocab_size=VOCAB_SIZE, nan_token=11)
    harness = Harness(rules=rules, config={"async_scheduling": overlap})
    broken = harness.add([*range(16), 11], 8)
    scored = harness.add([1, 11, 2, 3], 8, params={"prompt_logprobs": 1})
    good = [harness.add(prompt, 8) for prompt in prompts(3, longest=9, seed=3)]
    harness.run()
    assert harness.last[broken].error_code == "non_finite_logits"
    assert harness.ids[broken] == []
    assert harness.last[scored].error_code == "non_finite_logits"
    for name in good:
        harness.check_output(name)
    harness.check_idle()


def test_what_a_broken_request_cached_is_forgotten() -> None:
    rules = FakeRules(vocab_size=VOCAB_SIZE, nan_token=11)
    harness = Harness(rules=rules, config={"max_num_batched_tokens": 8})
    harness.add([*range(20, 44), 11], 8)
    harness.run()
    assert harness.core.stats().num_cached_blocks == 0
    harness.check_idle()


@pytest.mark.parametrize("where", ["rules", "commit", "lookup", "admission"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_in_one_request_spares_the_others(
    overlap: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(rules=QUIET, config={"async_scheduling": overlap})
    good = [harness.add(prompt, 8) for prompt in prompts(3)]
    harness.step()
    bad = harness.add(list(range(20)), 8, params={"min_tokens": 2}, stop_ids=[1])
    sequence = harness.core._scheduler.live[bad]

    def boom(*args: object, **kwargs: object) -> None:
        raise RuntimeError("boom")

    if where == "rules":
        monkeypatch.setattr("vllmx_engine.logit_rules.LogitRules.edits", boom)
    elif where == "commit":
        real = type(sequence).accept
        monkeypatch.setattr(
            type(sequence), "accept", lambda s, t: boom() if s is sequence else real(s, t)
        )
    elif where == "admission":
        sequence.request = msgspec.structs.replace(sequence.request, seed=-1)
    else:
        prefixes = harness.core._scheduler.prefixes
        look_up = prefixes.cached_blocks
        monkeypatch.setattr(
            prefixes, "cached_blocks", lambda s: boom() if s is sequence else look_up(s)
        )
    harness.run()
    assert harness.last[bad].error_code == "internal_error"
    assert "boom" not in (harness.last[bad].error or "")
    for name in good:
        harness.check_output(name)
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_fails_its_requests_alone(overlap: bool) -> None:
    harness = Harness(rules=QUIET, config={"async_scheduling": overlap}, model={"fail_steps": {3}})
    lost = harness.add([1, 2, 3], 12)
    for _ in range(4):
        harness.step()
    later = harness.add(list(range(20)), 5)
    harness.run()
    assert harness.last[lost].error_code == "internal_error"
    assert "as the test ordered" not in (harness.last[lost].error or "")
    assert harness.ids[lost] == harness.expected(lost)[:3]
    harness.check_output(later)
    harness.check_idle()


def test_a_launch_that_raises_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(rules=QUIET)
    lost = harness.add([1, 2, 3], 12)
    for _ in range(3):
        harness.step()
    with monkeypatch.context() as patch:
        patch.setattr(harness.loaded, "step", _raise_fake_error)
        harness.step()
    assert harness.last[lost].error_code == "internal_error"
    fine = harness.add([1, 2, 3], 3)
    harness.run()
    harness.check_output(fine)
    harness.check_idle()


def test_a_backend_that_keeps_failing_is_dead() -> None:
    harness = Harness(rules=QUIET, model={"fail_steps": range(100)})
    for prompt in prompts(9):
        harness.add(prompt, 4)
    with pytest.raises(EngineDeadError, match="3 steps in a row"):
        _keep_busy(harness, 20)
    assert {output.error_code for output in harness.last.values()} == {"internal_error"}
    with pytest.raises(EngineDeadError):
        harness.core.step()


def test_a_backend_that_says_it_is_dead_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(rules=QUIET)
    harness.add([1, 2, 3])

    def dead(*args: object) -> None:
        raise EngineDeadError("the device is gone")

    monkeypatch.setattr(harness.loaded, "step", dead)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        harness.step()


def test_abort_frees_at_once() -> None:
    harness = Harness(rules=QUIET)
    running, waiting = harness.add([1, 2, 3] * 5, 20), harness.add([4] * 9, 20)
    harness.step()
    harness.step()
    harness.abort(running, waiting, "unknown")
    harness.check_idle()
    assert harness.step() == []
    assert not harness.core.has_work
    harness.abort(running)


def test_nothing_follows_an_abort() -> None:
    harness = Harness()
    refused = harness.add([])
    harness.abort(refused)
    assert harness.step() == []
    assert not harness.core.has_work


def test_close_closes_the_model() -> None:
    harness = Harness()
    harness.add([1, 2, 3])
    harness.step()
    harness.core.close()
    assert harness.loaded.closed
    harness.check_idle()


def _keep_busy(harness: Harness, steps: int) -> None:
    for _ in range(steps):
        harness.add([1, 2, 3])
        harness.step()


def _raise_fake_error(*args: object) -> None:
    raise FakeError("no launch")
