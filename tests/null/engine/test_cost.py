"""The cost model of a step."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from vllmx_engine.core.cost import StepCost, StepLoad, fit_nonnegative

TRUE = (2e-3, 5e-6, 1e-9, 40e-6, 2e-9, 0.0, 0.0)


def seconds(load: StepLoad, rng: random.Random | None = None) -> float:
    exact = sum(c * x for c, x in zip(TRUE, (1.0, *load), strict=True))
    return exact * (rng.uniform(0.95, 1.05) if rng else 1.0)


def random_load(rng: random.Random, *, chunk: bool) -> StepLoad:
    rows = rng.randint(1, 64)
    tokens = rng.randint(16, 512) if chunk else 0
    return StepLoad(
        rows, rows * rng.randint(10, 4000), tokens, tokens * float(rng.randint(0, 4000))
    )


def learned(rng: random.Random | None = None) -> StepCost:
    cost = StepCost(20e-3, 16)
    source = random.Random(1)
    for index in range(200):
        load = random_load(source, chunk=index % 2 == 0)
        cost.observe(load, seconds(load, rng))
    return cost


def test_finds_the_coefficients() -> None:
    cost = learned()
    rng = random.Random(2)
    for _ in range(20):
        load = random_load(rng, chunk=True)
        assert cost.predict(load) == pytest.approx(seconds(load), rel=0.01)


def test_noise_costs_little() -> None:
    cost = learned(random.Random(3))
    rng = random.Random(2)
    errors = []
    for _ in range(50):
        load = random_load(rng, chunk=True)
        errors.append(abs(cost.predict(load) / seconds(load) - 1))
    assert np.median(errors) < 0.05


@pytest.mark.parametrize("start", [0, 1000, 100_000])
def test_chunks_fill_what_is_left(start: int) -> None:
    cost = learned()
    left = cost.chunk_seconds(8, 8000)
    assert left == pytest.approx(20e-3 - seconds(StepLoad(8, 8000)), rel=0.01)
    tokens = cost.chunk_tokens(left, start)
    work = tokens * (start + tokens / 2)
    assert seconds(StepLoad(8, 8000, int(tokens), work)) == pytest.approx(20e-3, rel=0.02)
    assert cost.chunk_cost(int(tokens), start) == pytest.approx(left, rel=0.02)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.4])
def test_nearly_all_steps_keep_the_target(spread: float) -> None:
    """The target is kept on a machine whose speed varies, too, and with no more room left unused
    than that takes."""
    cost, rng, took = StepCost(20e-3, 16), random.Random(5), []
    for _ in range(600):
        tokens = min(max(cost.chunk_tokens(cost.chunk_seconds(8, 8000), 500), 16), 4096)
        load = StepLoad(8, 8000, int(tokens), tokens * (500 + tokens / 2))
        took.append(seconds(load) * (1 + abs(rng.gauss(0, spread))))
        cost.observe(load, took[-1])
    settled = np.array(took[100:])
    assert np.quantile(settled, 0.95) < 20e-3 * 1.03
    assert np.quantile(settled, 0.98) > 20e-3 * 0.8


def test_each_prompt_that_waits_stretches_the_target() -> None:
    cost = learned()

    def step_s(num_decodes: int, num_prompts: int) -> float:
        left = cost.chunk_seconds(num_decodes, 8000, num_prompts)
        return left + cost.predict(StepLoad(num_decodes, 8000))

    for prompts, targets in ((1, 1), (2, 2), (5, 5), (8, 8), (100, 8)):
        assert step_s(8, prompts) == pytest.approx(targets * 20e-3, rel=0.01)
    for prompts, targets in ((1, 1), (5, 2), (100, 8)):  # four times as many as are few
        assert step_s(64, prompts) == pytest.approx(targets * 20e-3, rel=0.01)


def test_the_first_chunks_grow_step_by_step() -> None:
    """One step says nothing about which part of it was the chunk."""
    cost, sizes = StepCost(20e-3, 16), [16.0]
    for _ in range(3):
        load = StepLoad(1, 10, int(sizes[-1]), sizes[-1] ** 2 / 2)
        cost.observe(load, seconds(load))
        sizes.append(cost.chunk_tokens(cost.chunk_seconds(1, 10), 0))
    assert sizes == [16, 32, 64, 128]


def test_long_decoding_does_not_wash_out_what_prefill_costs() -> None:
    cost = learned()
    before = cost.chunk_tokens(10e-3, 0)
    for _ in range(10_000):
        load = StepLoad(4, 4000)
        cost.observe(load, seconds(load))
    assert cost.chunk_tokens(10e-3, 0) == pytest.approx(before, rel=0.05)


def test_follows_a_device_that_slows_down() -> None:
    cost = learned()
    rng = random.Random(4)
    for index in range(130):
        load = random_load(rng, chunk=index % 2 == 0)
        cost.observe(load, 3 * seconds(load))
    load = random_load(rng, chunk=True)
    assert cost.predict(load) == pytest.approx(3 * seconds(load), rel=0.05)


def test_no_target_no_decodes_or_no_times_mean_no_limit() -> None:
    assert StepCost(None, 16).chunk_seconds(8, 100) == math.inf
    assert learned().chunk_seconds(0, 0) == math.inf
    assert learned().chunk_tokens(math.inf, 5) == math.inf
    untimed = StepCost(1e-3, 16)
    untimed.observe(StepLoad(1, 10), 0.0)
    assert untimed.chunk_seconds(8, 100) == math.inf


def test_nothing_seen_affords_nothing() -> None:
    cost = StepCost(1e-3, 16)
    assert cost.predict(StepLoad(1, 1)) == 0.0
    assert cost.chunk_tokens(cost.chunk_seconds(1, 1), 0) == 0.0


def test_decodes_that_miss_the_target_leave_half_their_time_to_prefill() -> None:
    cost = StepCost(1e-3, 16)
    cost.observe(StepLoad(1, 10, 8, 8.0 * 8), 1.0)
    decodes_s = cost.predict(StepLoad(1, 10))
    assert decodes_s > 0.1
    assert cost.chunk_seconds(1, 10) == pytest.approx(decodes_s / 2)
    for seconds in (0.0, -1.0):
        assert cost.chunk_tokens(seconds, 0) == 0.0


def test_coefficients_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        steps = rng.random((rng.integers(1, 20), 6))
        assert min(fit_nonnegative(steps)) >= 0.0
