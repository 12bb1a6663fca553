"""Time between tokens of running rows while long prompts come in one after the other, by the whole
engine core on a simulated clock: what steps take depends on their tokens alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.wire.messages import CoreRequest, pack_ids
from vllmx_testing.fake import FakeLoadedModel, FakeRules, FakeStep

VOCAB_SIZE = 97
NUM_PROMPTS = 3
StepSeconds = Callable[[int, float], float]
"""Of a step's tokens and the pairs of positions that attend to each other."""


def two_cores(tokens: int, pairs: float) -> float:
    """Qwen3-0.6B in BF16 without AMX: 29 ms for one row, 39 for 8, 91 for 24."""
    few, many = 14.5e-3 + 3.2e-3 * tokens, 40.6e-3 + 2.42e-3 * tokens
    return max(29e-3, min(few, many)) + 0.2e-6 * pairs


def panels(tokens: int, pairs: float) -> float:
    """Sixteen rows of a panel cost as much as one."""
    return 30e-3 + 14e-3 * math.ceil(tokens / 16) + 0.25e-6 * pairs


def gpu(tokens: int, pairs: float) -> float:
    """Reads weights in 5 ms, 20,000 tokens a second beyond."""
    return max(5e-3, 1e-3 + 50e-6 * tokens) + 2e-9 * pairs


class SimulatedModel(FakeLoadedModel):
    """A model whose steps take no time, but say that they took what they would on a machine."""

    def __init__(self, step_s: StepSeconds) -> None:
        rules = FakeRules(vocab_size=VOCAB_SIZE)
        super().__init__(rules, num_blocks=3000, max_tokens=2048, verify_pages=False, strict=False)
        self._costs = step_s
        self.clock_s = 0.0

    def step(self, plan: StepPlan, rows: SamplingRows) -> FakeStep:
        handle = super().step(plan, rows)
        took = self._costs(plan.tokens.size, float((plan.positions + 1).sum()))
        self.clock_s += took
        handle._result.elapsed_s = took
        return handle


@dataclass
class Found:
    """Seconds that a client sees; the first prompt, of which the scheduler learns, is not in it."""

    alone_s: list[float]
    with_prompt_s: list[float]

    @property
    def stretch(self) -> float:
        """p99 between tokens while a prompt is computed, in times of the median without."""
        return float(np.quantile(self.with_prompt_s, 0.99) / np.median(self.alone_s))


def run(step_s: StepSeconds, num_rows: int, prompt: int) -> Found:
    model = SimulatedModel(step_s)
    config = EngineConfig(target_itl="auto", enable_prefix_caching=False)
    core = EngineCore(model, config, max_model_len=12_000, vocab_size=VOCAB_SIZE)
    rng = random.Random(1)

    def send(name: str, length: int, answer: int) -> None:
        ids = pack_ids([rng.randrange(VOCAB_SIZE) for _ in range(length)])
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        core.add(CoreRequest(request_id=name, prompt=ids, params=params, max_tokens=answer, seed=1))

    for row in range(num_rows):
        send(f"row {row}", 32, 11_000)
    for _ in range(30):
        core.step()
    found = Found([], [])
    for number in range(NUM_PROMPTS):
        for _ in range(30):
            before = model.clock_s
            core.step()
            found.alone_s.append(model.clock_s - before)
        has_come, gaps = False, list[float]()
        send(f"prompt {number}", prompt, 1)
        while not has_come:
            before = model.clock_s
            names = {output.request_id for output in core.step()}
            assert len(names) >= num_rows, "a running row got no token"
            gaps.append(model.clock_s - before)
            has_come = f"prompt {number}" in names
        if number:
            found.with_prompt_s += gaps
    core.close()
    return found


@pytest.mark.parametrize(
    ("step_s", "num_rows", "most"),
    [(two_cores, 1, 2.02), (two_cores, 4, 2.02), (panels, 4, 2.02), (gpu, 1, 2.3)],
)
def test_p99_is_near_twice_the_median_alone(
    step_s: StepSeconds, num_rows: int, most: float
) -> None:
    """Chunks of at least 16 tokens had 2.5 and 2.8 on two cores. A linear fit had 3.2 on a GPU,
    whose time is not linear: that is learned during the second prompt."""
    assert run(step_s, num_rows, 800).stretch < most
