"""How requests end in the engine core: lengths, refusals, faults, aborts, a backend that dies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllmx_core.errors import EngineDeadError
from vllmx_testing.fake import FakeError, FakeRules

from .harness import MAX_MODEL_LEN, QUIET, VOCAB_SIZE, Harness, prompts


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
        (b"123", {}, "invalid_request", "3 bytes"),
        ([1] * MAX_MODEL_LEN, {}, "context_length_exceeded", f"holds {MAX_MODEL_LEN - 1}"),
        ([1], {"params": {"stop_token_ids": (99,)}}, "invalid_request", "99"),
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
    prompt: list[int] | bytes, fields: dict[str, Any], code: str, words: str
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
        monkeypatch.setattr("vllmx_engine.core.logit_rules.LogitRules.edits", boom)
    elif where == "commit":
        real = type(sequence).accept
        monkeypatch.setattr(
            type(sequence), "accept", lambda s, t: boom() if s is sequence else real(s, t)
        )
    elif where == "admission":
        sequence.request = msgspec.structs.replace(sequence.request, seed=-1)
    else:
        prefixes = harness.core._scheduler.prefixes
        look = prefixes.look
        monkeypatch.setattr(prefixes, "look", lambda s: boom() if s is sequence else look(s))
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


@pytest.mark.parametrize("kept", [0, 3])
def test_an_abort_of_many_leaves_the_others(kept: int) -> None:
    """Running, preempted and waiting ones of several clients and priorities, and their choices."""
    harness = Harness(rules=QUIET, config={"max_num_seqs": 3, "max_num_batched_tokens": 16})
    names = []
    for number in range(60):
        prompt = [number % 20, *range(20)]
        names.append(
            harness.add(prompt, 4, client=f"client-{number % 7}", priority=(number // 3) % 3)
        )
        if number % 4 == 0:
            names.append(harness.add(prompt, 4, leader=names[-1], client=f"client-{number % 7}"))
        if number % 20 == 0:
            harness.step()
    harness.step()
    left = [name for name in names if name not in harness.last][len(names) // 2 :][:kept]
    harness.abort(*(name for name in names if name not in left))
    assert harness.core.stats().num_running + harness.core.stats().num_waiting == kept
    share, ranks = harness.core._scheduler.share, harness.core._scheduler._waiting.ranks
    assert len(share) == len({harness.requests[name].client for name in left})
    assert ranks.total() == kept
    harness.run()
    harness.check_outputs()
    assert set(left) <= harness.last.keys()
    harness.check_idle()


def test_what_many_left_behind_is_freed_step_by_step() -> None:
    """An abort of many does not hold up those that run; and all is freed at once when nobody
    runs."""
    harness = Harness(rules=QUIET, config={"max_num_seqs": 1})
    running = harness.add([1, 2, 3], 20)
    harness.step()
    scheduler = harness.core._scheduler
    dropped = scheduler._dropped
    harness.abort(*(harness.add([number % 20], 4) for number in range(600)))
    assert len(dropped) == 600
    harness.step()
    assert 0 < len(dropped) < 600
    harness.abort(running)
    assert not dropped
    harness.abort(*(harness.add([number % 20], 4) for number in range(600)))
    assert not dropped
    harness.check_idle()


def test_a_fault_between_the_halves_of_a_step_ends_that_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(rules=QUIET)
    lost = harness.add([1, 2, 3], 20, bad_words_ids=[[4, 5]])
    harness.step()
    harness.step()

    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(harness.core._builder, "edit", broken)
    while lost not in harness.last:
        harness.step()
    assert harness.last[lost].finish_reason == "error"
    name = harness.add([1, 2, 3], 5, bad_words_ids=[[4, 5]])
    harness.run()
    assert harness.last[name].finish_reason == "length"
    harness.check_idle()


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
