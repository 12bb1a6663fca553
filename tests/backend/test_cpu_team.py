"""The native threads: a step runs beside Python, and nothing runs between steps."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Array, Ops, StepInputs, Weight
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.loaded import CpuLoadedModel
from vllmx_cpu.native import Team
from vllmx_testing.harness import PAGE
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel


def wide_model(width: int = 1024, layers: int = 8) -> tuple[SyntheticModel, ArraySource]:
    builder = Builder(64)
    builder.embedding("embed", width)
    for layer in range(layers):
        builder.linear(f"{layer}", width, width)
    builder.linear("head", 64, width)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer in range(layers):
            x = ops.linear(x, w[f"{layer}"])
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(width, body), ArraySource(builder.arrays)


def load(model: SyntheticModel, source: ArraySource, threads: int = 2) -> CpuLoadedModel:
    options = LoadOptions(
        max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=1024, num_threads=threads
    )
    return CpuBackend().load(model, source, options)


def test_a_step_returns_before_it_has_run() -> None:
    loaded = load(*wide_model())
    plan = make_plan([Row([1] * 1024, 0, range(64))], PAGE)
    loaded.step(plan, sampling_rows(1)).result()

    def returns_before_it_has_run() -> bool:
        begin = time.perf_counter()
        handle = loaded.step(plan, sampling_rows(1))
        returned = time.perf_counter() - begin
        return handle.result().elapsed_s > returned

    # A busy machine may keep this thread waiting for longer than a step takes, but not each time.
    assert any(returns_before_it_has_run() for _ in range(20))
    loaded.close()


def test_idle_threads_take_no_processor_time() -> None:
    loaded = load(*decoder())
    loaded.step(make_plan([Row([1], 0, [0])], PAGE), sampling_rows(1)).result()

    def processor_s() -> float:
        before = time.process_time()
        time.sleep(0.2)
        return time.process_time() - before

    assert any(processor_s() < 0.02 for _ in range(20))  # once they have fallen asleep
    loaded.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    model, source = decoder(211)
    plan = make_plan([Row(list(range(40)), 0, [0, 1, 2], "all"), Row([3], 0, [5])], PAGE)
    results = []
    for count in (1, threads):
        loaded = load(model, source, count)
        rows = sampling_rows(plan.num_logit_rows, num_logprobs=20)
        results.append(loaded.step(plan, rows).result().logprobs)
        loaded.close()
    one, many = results
    assert one is not None
    assert many is not None
    np.testing.assert_array_equal(one.top, many.top)
    np.testing.assert_array_equal(one.top_ids, many.top_ids)


def test_more_threads_than_cores_finish_many_short_steps() -> None:
    """Barriers sleep when spinning is in vain: 16 threads must not take seconds."""
    loaded = load(*decoder(), threads=16)
    plan, rows = make_plan([Row([1], 0, [0])], PAGE), sampling_rows(1)
    ids = {int(loaded.step(plan, rows).result().ids[0]) for _ in range(100)}
    assert len(ids) == 1
    loaded.close()


def test_teams_come_and_go() -> None:
    for _ in range(20):
        team = Team(3)
        team.close()
        team.close()
