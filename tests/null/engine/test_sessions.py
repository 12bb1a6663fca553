"""Sessions pin their blocks: within a client's limits, until they end or nothing else is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx_testing.fake import FakeRules

from .harness import EOS, VOCAB_SIZE, Harness

RULES = FakeRules(VOCAB_SIZE, eos_id=EOS, eos_rate=1 << 30)
FULL = {"num_blocks": 30}


def harness(now: list[float] | None = None, **config: Any) -> Harness:
    clock = [0.0] if now is None else now
    fields = {"max_num_seqs": 2, "session_share": 0.5} | config
    return Harness(FULL, fields, RULES, max_model_len=200, clock=lambda: clock[0])


def prompt(number: int, length: int = 43) -> list[int]:
    return [10 + number] * length


def ask(engine: Harness, number: int, **fields: Any) -> int:
    """The cached tokens of a prompt."""
    name = engine.add(prompt(number), 4, **fields)
    engine.run()
    engine.check_idle()
    return engine.first[name].num_cached_tokens


def flood(engine: Harness) -> None:
    """Other prompts take all blocks."""
    for number in range(20, 29):
        ask(engine, number)


def test_a_session_outlives_other_prompts() -> None:
    engine = harness()
    ask(engine, 0, session_id="s")
    ask(engine, 1)
    assert engine.core.stats().num_sessions == 1
    assert engine.core.stats().num_pinned_blocks == 5
    flood(engine)
    assert ask(engine, 1) == 0
    assert ask(engine, 0) == 40


def test_a_session_that_ends_is_like_others() -> None:
    engine = harness()
    ask(engine, 0, session_id="s", client="a")
    assert not engine.core.end_session("b", "s")
    assert engine.core.end_session("a", "s")
    assert not engine.core.end_session("a", "s")
    assert engine.core.stats().num_pinned_blocks == 0
    flood(engine)
    assert ask(engine, 0) == 0


def test_limits_of_each_client() -> None:
    engine = harness(session_limit=2)
    for number in range(3):
        ask(engine, number, session_id=f"s{number}", client="a")
    ask(engine, 3, session_id="s0", client="b")
    assert engine.core.stats().num_sessions == 3
    flood(engine)
    assert [ask(engine, number) for number in (1, 2, 3)] == [40, 40, 40]
    assert ask(engine, 0) == 0


def test_the_share_of_a_client() -> None:
    engine = harness(session_share=0.34)  # ten blocks: two sessions
    for number in range(3):
        ask(engine, number, session_id=f"s{number}")
    assert engine.core.stats().num_pinned_blocks == 10
    flood(engine)
    assert [ask(engine, number) for number in (1, 2)] == [40, 40]
    small = harness(session_share=0.1)
    ask(small, 0, session_id="s")
    assert small.core.stats().num_sessions == 0


def test_old_sessions_end() -> None:
    now = [0.0]
    engine = harness(now, session_age_s=60.0)
    ask(engine, 0, session_id="s")
    now[0] = 59.0
    assert engine.core.stats().num_sessions == 1
    now[0] = 61.0
    assert engine.core.stats().num_sessions == 0
    flood(engine)
    assert ask(engine, 0) == 0


def test_pins_stop_nobody() -> None:
    """A prompt that needs all blocks gets them."""
    engine = harness(session_share=1.0)
    for number in range(5):
        ask(engine, number, session_id=f"s{number}")
    long = engine.add(prompt(9, 180), 4)
    engine.run()
    engine.check_outputs()
    assert engine.first[long].num_cached_tokens == 0


def test_the_next_turn_takes_the_pins_over() -> None:
    engine = harness()
    ask(engine, 0, session_id="s")
    longer = engine.add(prompt(0) + prompt(1), 4, session_id="s")
    engine.run()
    assert engine.first[longer].num_cached_tokens == 40
    assert engine.core.stats().num_pinned_blocks == 11
    flood(engine)
    assert ask(engine, 0) == 40


@pytest.mark.parametrize("off", [{"session_share": 0.0}, {"enable_prefix_caching": False}])
def test_off(off: dict[str, Any]) -> None:
    engine = harness(**off)
    ask(engine, 0, session_id="s")
    assert engine.core.stats().num_sessions == 0
    assert not engine.core.end_session("", "s")


def test_evicted_sessions_are_found_below(tmp_path: Path) -> None:
    engine = harness(kv_disk=str(tmp_path), session_share=1.0)
    for number in range(5):
        ask(engine, number, session_id=f"s{number}")
    engine.add(prompt(9, 180), 4)
    engine.run()
    tiers = engine.core._scheduler.tiers
    assert tiers is not None
    tiers.tiers.wait()
    assert [ask(engine, number) for number in range(5)] == [40] * 5
    engine.core.close()
