"""What work of lower priority adds to the steps of rows that decode: simulated device times."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_engine.core import step_budget

from .harness import QUIET, Harness

LOWER = 1000


def harness(token_s: float, **config: Any) -> Harness:
    """A step takes a millisecond and `token_s` for each token."""
    return Harness(
        rules=QUIET,
        model={
            "num_blocks": 1000,
            "max_tokens": 256,
            "max_logit_rows": 64,
            "step_s": 1e-3,
            "token_s": token_s,
        },
        config={"max_num_seqs": 32, "enable_prefix_caching": False, **config},
        max_model_len=600,
    )


def test_rows_of_lower_priority_take_turns_for_their_share() -> None:
    """A row alone takes 1.1 ms, so that others may add 0.55 ms: five rows of 31."""
    made = harness(1e-4)
    lower = [made.add([index] * 4, 200, priority=LOWER) for index in range(31)]
    for _ in range(12):
        made.step()
    assert made.loaded.records[-1].num_decodes == 31, "alone they have all there is"
    urgent = made.add([40] * 4, 100)
    for _ in range(12):
        made.step()
    before = {name: len(made.ids[name]) for name in (urgent, *lower)}
    first = len(made.loaded.records)
    for _ in range(62):
        made.step()
    sizes = [sum(record.lengths) for record in made.loaded.records[first:]]
    assert set(sizes) == {6}
    gained = {name: len(made.ids[name]) - count for name, count in before.items()}
    assert gained.pop(urgent) == 62, "it decodes in every step"
    assert set(gained.values()) == {10}, "each has its turn"
    made.run()
    assert made.loaded.records[-2].num_decodes == 31
    made.check_outputs()
    made.check_idle()


def test_rows_of_lower_priority_give_way_for_a_while_to_one_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One who asks for a token now and then meets no step of 31 rows: 1.1 ms, and half of it more
    is what a step of theirs takes, also with the prompt that comes in."""
    monkeypatch.setattr(step_budget, "_HOLDS_ON_S", 0.1)
    made = harness(1e-4)
    lower = [made.add([index] * 4, 150, priority=LOWER) for index in range(31)]
    for _ in range(12):
        made.step()
    assert made.loaded.records[-1].num_decodes == 31
    made.add([40] * 4, 1)
    made.step()
    made.step()
    first = len(made.loaded.records)
    for index in range(5):
        made.add([index] * 8, 1)
        for _ in range(20):
            made.step()
    sizes = [sum(record.lengths) for record in made.loaded.records[first:]]
    assert set(sizes) == {6, 3 + 8}
    before = {name: len(made.ids[name]) for name in lower}
    for _ in range(31):
        made.step()
    gained = {len(made.ids[name]) - count for name, count in before.items()}
    assert gained == {6}, "each has its turn"
    for _ in range(40):  # 0.1 s of steps
        made.step()
    assert made.loaded.records[-1].num_decodes == 31, "nobody came for so long"
    made.run()
    made.check_outputs()
    made.check_idle()


def test_prompts_of_lower_priority_give_way_for_a_while_to_one_that_left() -> None:
    made = harness(1e-5)
    made.add([1] * 4, 1)
    for index in range(20):
        made.add([index] * 200, 3, priority=LOWER)
    for _ in range(40):
        made.step()
    made.add([1] * 4, 1)
    made.step()
    made.step()
    first = len(made.loaded.records)
    for _ in range(20):
        made.step()
    sizes = [sum(record.lengths) for record in made.loaded.records[first:]]
    assert 0 < max(sizes) <= 52 + 20
    made.run()
    made.check_outputs()


def test_prompts_of_lower_priority_have_the_share_too() -> None:
    """Two rows take 1.02 ms: 51 tokens of a prompt are half of it."""
    made = harness(1e-5)
    urgent = [made.add([index] * 4, 300) for index in range(2)]
    for _ in range(4):
        made.step()
    learnt = made.add([7] * 300, 2, priority=LOWER)  # what a token of a prompt costs
    while learnt not in made.last:
        made.step()
    first = len(made.loaded.records)
    long = made.add([8] * 500, 2, priority=LOWER)
    while long not in made.first:
        made.step()
    chunks = [max(record.lengths) for record in made.loaded.records[first:]]
    assert max(chunks) <= 52
    assert sorted(chunks)[len(chunks) // 2] >= 45, "held back without need"
    assert all(len(record.lengths) >= 2 for record in made.loaded.records[first:])
    made.core.abort(urgent)
    made.run()


def test_many_prompts_of_lower_priority_stretch_no_step() -> None:
    """However many of them wait, one step takes no longer than half as much again."""
    made = harness(1e-5)
    made.add([1] * 4, 300)
    for index in range(31):
        made.add([index] * 60, 40, priority=LOWER)
    for _ in range(20):
        made.step()
    first = len(made.loaded.records)
    for _ in range(100):
        made.step()
    sizes = [sum(record.lengths) for record in made.loaded.records[first:]]
    assert max(sizes) <= 1 + 51
    made.run()
    made.check_outputs()


def test_without_a_target_nobody_is_held_back() -> None:
    made = harness(1e-4, target_itl="none")
    for index in range(31):
        made.add([index] * 4, 100, priority=LOWER)
    made.add([40] * 4, 60)
    for _ in range(30):
        made.step()
    assert made.loaded.records[-1].num_decodes == 32


def test_a_prompt_keeps_no_pace_for_rows_of_lower_priority() -> None:
    """Nor does it share its step with their prompts."""
    made = harness(1e-4, target_itl="5")
    for index in range(20):
        made.add([index] * 4, 200, priority=LOWER)
    for _ in range(30):
        made.step()
    made.add([3] * 60, 40, priority=LOWER)
    urgent = made.add([40] * 200, 5)
    made.step()
    made.step()
    step = next(record for record in made.loaded.records if max(record.lengths) > 100)
    assert sorted(step.lengths)[-2:] == [1, 200]
    while urgent not in made.last:
        made.step()
    made.run()
    made.check_outputs()
