"""Drafts: whatever is drafted, answers are those without drafts, and good drafts save steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.model import DraftSpec
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_engine.core import grammar_rows
from vllmx_engine.core.drafters import Guess, match_ends
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.grammar.matcher import QUICK_S
from vllmx_engine.wire.messages import pack_ids
from vllmx_testing.fake import FakeRules, FakeStep

from .grammar_driver import TOKENS, Driver, regex
from .harness import EOS, QUIET, RULES, VOCAB_SIZE, Harness, prompts


def run_mixed(count: int, *, overlap: bool, slots: int | None = None) -> Harness:
    """Runs requests of all kinds with drafts of `count` tokens, a fifth of them wrong. `slots`: of
    a model with recurrent states."""
    harness = Harness(
        {"max_tokens": 64, "max_logit_rows": 64, "num_state_slots": slots},
        {"async_scheduling": overlap, "state_snapshot_tokens": 1},
        replace(RULES, has_states=slots is not None),
        (0.2, count),
    )
    for index, prompt in enumerate(prompts(12, seed=count)):
        params = [
            {},
            {"temperature": 0.7},
            {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
            {"min_tokens": 9, "logprobs": 2},
            {"allowed_token_ids": tuple(range(20))},
            {"prompt_logprobs": 1, "temperature": 1.0},
        ][index % 6]
        bad_words = [[a, b] for a in range(8) for b in range(8)]
        harness.add(prompt, 24, params=params, bad_words_ids=bad_words)
    harness.run()
    for name in ("r0", "r1", "r2"):  # later turns, which begin with what the first ones left
        harness.add([*harness.requests[name].prompt_ids.tolist(), *harness.ids[name], 1], 6)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    return harness


def run_plain(count: int | None, *, stages: int = 1) -> Harness:
    """Runs requests that are verified as arrays, then some of them beside others with many stop
    ids, bad words, log-probabilities or answers that come at the end, and aborts a few."""
    harness = Harness(
        {"max_tokens": 64, "max_logit_rows": 64, "num_stages": stages}, {}, RULES, (0.2, count)
    )
    bad_words = [[first, behind] for first in range(48) for behind in range(first % 2, 48, 2)]
    for index, prompt in enumerate(prompts(32, seed=7)):
        params, fields = {"temperature": index % 2}, dict[str, Any]()
        stop_ids = [EOS, *range(20, 20 + index // 16)]
        if index in (8, 16):
            harness.run()
        if index >= 8:
            params |= {} if index % 3 else {"logprobs": 1}
            fields = {} if index % 4 < 2 else {"bad_words_ids": bad_words}
            stop_ids += range(30, 34) if index % 5 == 0 else []
        fields |= {"stop_ids": stop_ids, "at_end": index % 4 == 1}
        harness.add(prompt, 40 - index, params=params, **fields)
    for name in ("r17", "r22", "r28"):
        for _ in range(5):
            harness.step()
        harness.abort(name)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    return harness


@pytest.mark.parametrize("count", [None, 1, 3, 4, 16])
@pytest.mark.parametrize("stages", [1, 3])
def test_answers_of_plain_rows_do_not_depend_on_drafts(count: int | None, stages: int) -> None:
    harness = run_plain(count, stages=stages)
    assert harness.core.stats().num_accepted_tokens
    reasons = {output.finish_reason for output in harness.last.values()}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("count", range(1, 17))
@pytest.mark.parametrize("overlap", [True, False])
def test_answers_do_not_depend_on_drafts(count: int, overlap: bool) -> None:
    stats = run_mixed(count, overlap=overlap).core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(stats.accepted_at) == stats.num_accepted_tokens


@pytest.mark.parametrize("count", [1, 2, 7, 8, 16])
@pytest.mark.parametrize("slots", [10, 14, 200])
def test_answers_of_recurrent_models_do_not_depend_on_drafts(count: int, slots: int) -> None:
    stats = run_mixed(count, overlap=True, slots=slots).core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_states_behind_a_draft_become_snapshots() -> None:
    """A later turn begins with the states behind the last full block, though each step of the
    answer before it went past the end of one, or ended with it."""
    for count in (4, 7, 16):
        rules = replace(QUIET, has_states=True)
        harness = Harness({"num_state_slots": 40}, {}, rules, (0.0, count))
        harness.add([1, 2, 3], 40)
        harness.run()
        turn = [1, 2, 3, *harness.ids["r0"]]
        harness.add([*turn, 4], 8)
        harness.run()
        harness.check_outputs()
        assert harness.first["r1"].num_cached_tokens == (len(turn) - 1) // 8 * 8
        assert harness.core.stats().num_steps < 2 + 48 / count + 3


@pytest.mark.parametrize(("num_slots", "drafted"), [(3, 1), (5, 3), (40, 8)])
def test_slots_that_are_scarce_shorten_drafts(num_slots: int, drafted: int) -> None:
    rules = replace(QUIET, has_states=True)
    harness = Harness({"num_state_slots": num_slots}, {"max_num_seqs": 1}, rules, (0.0, 8))
    harness.add([1, 2, 3], 41)
    harness.run()
    harness.check_outputs()
    longest = max(max(record.lengths) for record in harness.loaded.records[1:])
    assert longest == drafted + 1


def test_right_drafts_save_steps() -> None:
    """A draft of k right tokens makes k + 1 tokens of one step."""
    harness = Harness(rules=QUIET, drafts=(0.0, 4))
    harness.add([1, 2, 3], 41)
    harness.run()
    harness.check_outputs()
    assert harness.core.stats().num_steps == 1 + 8
    stats = harness.core.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (32, 32)
    assert harness.last["r0"].num_accepted == len(harness.last["r0"].ids) - 1


def test_drafts_that_do_not_pay_are_not_made() -> None:
    """Wrong drafts end drafting, and steps overlap again: the device waits for nobody."""
    harness = Harness({"token_s": 1e-5, "step_s": 1e-4}, {}, QUIET, (1.0, None), 256)
    harness.add([1, 2, 3], 200)
    harness.run()
    harness.check_outputs()
    assert harness.core.stats().num_draft_tokens < 10
    assert len(harness.loaded.records) < 210


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages(num_stages: int) -> None:
    harness = Harness({"num_stages": num_stages}, {}, RULES, (0.3, 3))
    for prompt in prompts(10):
        harness.add(prompt, 20)
    harness.run()
    harness.check_outputs()
    assert harness.core.stats().num_accepted_tokens > 0


def test_predictions_are_drafted_without_a_drafter() -> None:
    """A request's prediction is drafted, wherever the answer goes on with it."""
    harness = Harness(rules=QUIET)
    harness.add([1, 2, 3], 40)
    harness.run()
    answer = harness.ids["r0"]
    assert harness.core.stats().num_draft_tokens == 0
    edited = [*answer[:12], 0, 0, *answer[12:]]
    harness.add([1, 2, 3], 40, prediction=pack_ids(edited), name="predicted")
    before = harness.core.stats().num_steps
    harness.run()
    harness.check_outputs()
    assert harness.ids["predicted"] == answer
    assert harness.core.stats().num_steps - before < 15
    assert harness.core.stats().num_accepted_tokens > 25
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_before_a_broken_one_are_sent(overlap: bool) -> None:
    rules = FakeRules(vocab_size=VOCAB_SIZE, nan_token=11)
    harness = Harness({}, {"async_scheduling": overlap}, rules, (0.0, 16))
    for prompt in prompts(20, longest=9):
        if 11 not in prompt:
            harness.add(prompt, 30)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    broken = [name for name, last in harness.last.items() if last.error_code]
    assert max(len(harness.ids[name]) for name in broken) > 3


def test_a_draft_up_to_a_place_where_all_is_forbidden() -> None:
    """The tokens before it are sent, and the error says why, as without drafts."""
    ends = []
    a, b, c, d = (TOKENS.index(letter) for letter in (b"a", b"b", b"c", b"d"))
    for drafts in (None, {"r": [a, b, c]}):
        driver = Driver(drafts=drafts)
        words = [[b, c], [b, d]]
        driver.add("r", regex("[ax][b][cd]"), bad_words_ids=[*words, [TOKENS.index(b"x")]])
        driver.run()
        last = driver.last["r"]
        ends.append((driver.ids["r"], last.error_code, last.error))
    assert ends[0] == ends[1]
    assert ends[0][:2] == ([a, b], "invalid_request")


def test_drafts_end_where_masks_turn_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for the masks of its drafts."""
    plain = Driver()
    plain.add("r", regex("[a-z]{20}"))
    plain.run()
    driver = Driver(drafts=dict(plain.ids))
    seconds = itertools.count(0.0, 2 * QUICK_S)
    monkeypatch.setattr(grammar_rows, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    driver.add("r", regex("[a-z]{20}"))
    driver.run()
    assert driver.ids == plain.ids
    assert 0 < driver.core.stats().num_draft_tokens <= 5


def test_blocks_that_are_scarce_shorten_drafts() -> None:
    harness = Harness({"num_blocks": 6}, {"max_num_seqs": 3}, QUIET, (0.1, 16))
    for prompt in prompts(6, longest=12):
        harness.add(prompt, 20)
    harness.run()
    harness.check_outputs()
    harness.check_idle()


@pytest.mark.parametrize(
    ("context", "least", "ends"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [2]),
        ([1, 2, 3, 9, 4, 2], 2, []),
        ([1, 2, 3, 9, 4, 2], 1, [2]),
        ([5, 5, 5, 5], 2, [3]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [2, 5]),
        ([0, 1, 2, 7, 0, 1, 2, 8, 5, 1, 2], 2, [3, 7]),
        ([2, -1, 2], 1, [1]),
        ([1, -1, 2, 3, 1, -1, 2], 1, [3]),
        ([4], 1, []),
    ],
)
def test_longest_matches(context: list[int], least: int, ends: list[int]) -> None:
    assert match_ends(np.array(context, np.int32), least).tolist() == ends


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ({}, {}),
        ({"num_blocks": 9}, {"max_num_seqs": 3}),  # preempts
        ({"max_tokens": 12}, {"max_num_seqs": 4}),  # cuts prompts and catches up in parts
        ({}, {"enable_prefix_caching": False, "async_scheduling": False}),
        ({"block_size": 16}, {"max_num_seqs": 2}),
    ],
)
def test_a_draft_model_has_seen_all_tokens(model: dict[str, Any], config: dict[str, Any]) -> None:
    """A fake model draws what its pages hold: one with the same rules drafts right tokens alone,
    unless its pages lack something."""
    config = {"speculate_tokens": "3", **config}
    sizes = {"max_tokens": 200, "max_logit_rows": 200} | model
    harness = Harness(sizes, config, QUIET, draft_model=True)
    system = list(range(20))
    for index, prompt in enumerate(prompts(14, longest=20)):
        harness.add([*system, *prompt] if index % 2 else prompt, 20, params={"temperature": 0.7})
        if index % 4 == 3:
            harness.step()
            harness.step()
    harness.abort("r2")
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    stats = harness.core.stats()
    assert stats.num_draft_tokens > (20 if "max_tokens" in model else 100)
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    if not model and "enable_prefix_caching" not in config:  # what one computed serves others
        assert harness.drafter.num_tokens < harness.loaded.num_tokens


@pytest.mark.parametrize("spec", [DraftSpec((0,), (8,), 8), DraftSpec((0,), (8,), 8, 5, 1)])
def test_a_drafter_of_hidden_states_keeps_to_its_rows(
    spec: DraftSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """No step of it fails: none writes a block of an ended row that another row has by then."""
    config = {"speculate_tokens": "3"}
    harness = Harness({"max_tokens": 40}, config, RULES, draft_model=True, draft_spec=spec)
    for prompt in prompts(12):
        harness.add(prompt, 30)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    assert harness.core.stats().num_draft_tokens > 200
    assert not caplog.records


def test_a_draft_model_with_a_shorter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tables for later positions."""
    harness = Harness({}, {"speculate_tokens": "5"}, QUIET, draft_model=True, draft_model_len=20)
    last: list[int] = []
    step = harness.drafter.step

    def noting(plan: StepPlan, rows: SamplingRows) -> FakeStep:
        last.append(int(plan.positions.max()))
        return step(plan, rows)

    monkeypatch.setattr(harness.drafter, "step", noting)
    for prompt in prompts(6):
        harness.add(prompt, 30)
    harness.run()
    harness.check_outputs()
    assert 15 < max(last) < 20


def test_a_draft_model_that_fails_costs_its_drafts_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness({}, {"speculate_tokens": "2"}, QUIET, draft_model=True)
    harness.drafter.fail_steps = frozenset(range(4, 100))
    for prompt in prompts(3):
        harness.add(prompt, 24)
    harness.run()
    harness.check_outputs()
    assert harness.core.stats().num_accepted_tokens > 0
    assert harness.drafter.num_steps < 14
    assert "nothing is drafted any more" in caplog.text
    assert not harness.core._scheduler.speculator.wants_tokens  # steps overlap again


def boom(*_: Any) -> Any:
    raise RuntimeError("boom")


class AnyDrafter:
    """Guesses and learns by functions."""

    def __init__(self, guess: Callable[[int], Any], ended: Callable[..., Any] = bool) -> None:
        self._guess, self._ended = guess, ended

    def guess(self, sequence: Sequence, most: int) -> Guess:
        found: Guess = self._guess(most)
        return found

    def ended(self, sequence: Sequence) -> None:
        self._ended()


@pytest.mark.parametrize("num_tokens", [3, None])
@pytest.mark.parametrize(
    ("drafter", "num_logs"),
    [
        (AnyDrafter(boom), 1),
        (AnyDrafter(lambda most: Guess([5] * most), boom), 1),
        (AnyDrafter(lambda most: Guess([-1] * most)), 1),
        (AnyDrafter(lambda most: Guess([VOCAB_SIZE] * most)), 1),
        (AnyDrafter(lambda most: Guess([2**40] * most)), 1),
        (AnyDrafter(lambda most: Guess([1.5] * most)), 1),  # type: ignore[list-item]
        (AnyDrafter(lambda most: Guess(["a"] * most)), 1),  # type: ignore[list-item]
        (AnyDrafter(lambda most: None), 1),
        (AnyDrafter(lambda most: SimpleNamespace(ids=[5] * most)), 1),
        (AnyDrafter(lambda most: [5] * most), 1),
        (AnyDrafter(lambda most: Guess([5] * most, ["a"] * most)), 1),  # type: ignore[list-item]
        (AnyDrafter(lambda most: Guess([5] * 500)), 0),
        (AnyDrafter(lambda most: Guess(np.array([5] * most))), 0),  # type: ignore[arg-type]
        (AnyDrafter(lambda most: Guess([5] * most, [0.5])), 0),
        (AnyDrafter(lambda most: Guess([5] * most, [math.nan] * most)), 0),
    ],
)
def test_a_faulty_drafter_costs_its_drafts_alone(
    drafter: AnyDrafter, num_logs: int, num_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(rules=QUIET)
    harness.core.draft_with(Drafting(drafter, num_tokens))
    for prompt in prompts(4):
        harness.add(prompt, 20)
    harness.run()
    harness.check_outputs()
    harness.check_idle()
    assert len(caplog.records) == num_logs
