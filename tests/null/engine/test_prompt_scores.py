"""Prompts whose log-probabilities are wanted begin behind a cached prefix whose are known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.plan import MAX_LISTED_LOGPROBS
from vllmx_testing.fake import FakeRules

from .harness import QUIET, VOCAB_SIZE, Harness

PROMPT = [token % 40 for token in range(8 * 4 + 3)]
WINDOWS = FakeRules(VOCAB_SIZE, windows=(None, 13))


def cached(engine: Harness, prompt: list[int], wanted: int | None, **fields: Any) -> int:
    """Tokens of a prompt that come from the cache; checks all log-probabilities."""
    name = engine.add(prompt, 2, params={"prompt_logprobs": wanted}, **fields)
    engine.run()
    engine.check_output(name)
    engine.check_idle()
    return engine.first[name].num_cached_tokens


@pytest.mark.parametrize("rules", [QUIET, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("max_logit_rows", [5, 32])
def test_known_log_probabilities_come_with_a_hit(rules: FakeRules, max_logit_rows: int) -> None:
    engine = Harness({"max_logit_rows": max_logit_rows}, rules=rules)
    assert cached(engine, PROMPT, None) == 0
    assert cached(engine, PROMPT, 1) == 0, "nobody asked for them yet"
    assert [cached(engine, PROMPT, wanted) for wanted in (1, 0)] == [32, 32]
    assert cached(engine, PROMPT, 3) == 0, "fewer are known"
    assert cached(engine, PROMPT, 1) == 32, "the others are cut"
    assert cached(engine, [*PROMPT[:20], *range(20)], 3) == 16
    assert cached(engine, PROMPT, 2, cache_salt="another") == 0


def test_a_prompt_that_leaves_at_the_end_of_a_block_computes_that_block() -> None:
    """What is known behind its last token is of another token."""
    engine = Harness(rules=QUIET)
    assert cached(engine, PROMPT, 1) == 0
    assert cached(engine, [*PROMPT[:16], 47, *PROMPT], 1) == 8
    assert cached(engine, PROMPT[:16], 1) == 8, "its last token is computed"
    assert cached(engine, PROMPT[:17], 1) == 8, "the newest is kept"


def test_they_are_forgotten_with_their_blocks() -> None:
    engine = Harness({"num_blocks": 8}, rules=QUIET)
    cached(engine, PROMPT, 1)
    scores = engine.core._scheduler.cache.scores
    assert len(scores) == 4
    cached(engine, [9] * 60, None)
    assert not scores
    assert cached(engine, PROMPT, 1) == 0
    engine.core.reset_prefix_cache()
    assert not scores


def test_blocks_from_lower_tiers_have_none(tmp_path: Path) -> None:
    for expected in (0, 0):
        engine = Harness(rules=QUIET, config={"kv_disk": str(tmp_path)})
        assert [cached(engine, PROMPT, 1) for _ in range(2)] == [expected, 32]
        engine.core.close()


def test_long_lists_are_not_kept() -> None:
    rules = FakeRules(vocab_size=MAX_LISTED_LOGPROBS + 8)
    engine = Harness(rules=rules)
    assert [cached(engine, PROMPT, MAX_LISTED_LOGPROBS) for _ in range(2)] == [0, 32]
    cached(engine, PROMPT[::-1], MAX_LISTED_LOGPROBS + 1)
    assert len(engine.core._scheduler.cache.scores) == 4


def test_preempted_and_failing_prompts_have_them_in_order() -> None:
    """Prompts of few beginnings that take each other's blocks, with steps that fail."""
    rng = random.Random(0)
    engine = Harness({"num_blocks": 12, "max_logit_rows": 9}, rules=QUIET)
    for number in range(60):
        length = rng.randint(1, 40)
        prompt = [*PROMPT[:length], rng.randrange(3), *PROMPT[: 40 - length]]
        params = {"prompt_logprobs": rng.choice([None, 0, 1, 2])}
        engine.add(prompt, rng.randint(1, 20), params=params, priority=rng.randint(-1, 1))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if number % 20 == 7:
            engine.order_fault(2, at_launch=bool(number % 2))
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    assert engine.core.stats().num_preemptions
    assert any(first.num_cached_tokens for first in engine.first.values())
