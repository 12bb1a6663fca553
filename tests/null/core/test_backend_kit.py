"""What all backends share: names of dtypes, limits of a step, and the steps in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.backend_kit.limits import LOGITS_BYTES, check_weights_fit, step_limits
from vllmx_core.dtypes import choose_dtype, short_dtype
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.plan import StepPlan
from vllmx_testing.fake import FakeLoadedModel
from vllmx_testing.plans import Row, make_plan, sampling_rows

INFO = FakeLoadedModel(max_tokens=4, max_logit_rows=2).info


def plan(num_tokens: int, num_rows: int = 1) -> StepPlan:
    rows = [Row([1], 0, [i]) for i in range(num_rows - 1)]
    return make_plan([*rows, Row([1] * (num_tokens - len(rows)), 0, [9])], 16)


@pytest.mark.parametrize(
    ("name", "short"),
    [("bfloat16", "bf16"), ("half", "f16"), ("fp16", "f16"), ("float", "f32"), ("int8", "int8")],
)
def test_names_of_dtypes(name: str, short: str) -> None:
    assert short_dtype(name) == short


def test_the_dtype_of_a_model() -> None:
    has = ("bf16", "f32")
    assert choose_dtype("auto", "bfloat16", has, "CPU") == "bf16"
    assert choose_dtype("float32", "bf16", has, "CPU") == "f32"
    with pytest.raises(ConfigError, match="the CPU backend has no dtype 'f16': choose bf16, f32"):
        choose_dtype("half", "bf16", has, "CPU")


def test_limits_of_a_step() -> None:
    options = LoadOptions(max_num_seqs=5, max_num_batched_tokens=2047)
    assert step_limits(options, 100) == {"T": 2047, "L": 2047}
    vocab_size = LOGITS_BYTES // 4 // 10
    assert step_limits(options, vocab_size) == {"T": 2047, "L": 10}
    assert step_limits(options, vocab_size, multiple=4) == {"T": 2048, "L": 12}
    assert step_limits(options, 10 * vocab_size) == {"T": 2047, "L": 5}
    assert step_limits(options, 10 * vocab_size, num_seqs=9) == {"T": 2047, "L": 9}
    assert step_limits(replace(options, max_num_batched_tokens=2), 100) == {"T": 5, "L": 5}


def test_weights_that_do_not_fit() -> None:
    check_weights_fit(2048, 2048, "bf16", remedy="none")
    with pytest.raises(CapacityError, match=r"take 2048 bytes as bf16, 1024 .* free on x: buy"):
        check_weights_fit(2048, 1024, "bf16", where=" on x", remedy="buy more")


def test_steps_in_flight() -> None:
    steps: InFlight[str] = InFlight(INFO)
    for step in ("first", "second"):
        steps.check_room(plan(4))
        steps.add(step)
    with pytest.raises(AssertionError, match="a third step in flight"):
        steps.check_room(plan(1))
    with pytest.raises(AssertionError, match="out of the order"):
        steps.check_oldest("second")
    for step in ("first", "second"):
        steps.check_oldest(step)
        steps.remove_oldest()
    with pytest.raises(AssertionError, match="called twice"):
        steps.check_oldest("second")
    assert (steps.close(), steps.close()) == (True, False)
    with pytest.raises(AssertionError, match="closed"):
        steps.check_room(plan(1))


def test_a_step_that_waits_for_its_sampler() -> None:
    steps: InFlight[str] = InFlight(INFO)
    steps.add("first")
    steps.add_unsampled("second", plan(1))
    with pytest.raises(AssertionError, match=r"waits for sample\(\)"):
        steps.check_room(plan(1))
    steps.check_oldest("first")
    steps.remove_oldest()
    with pytest.raises(AssertionError, match=r"result\(\) before sample\(\)"):
        steps.check_oldest("second")
    with pytest.raises(RuntimeError), steps.sampling("second", sampling_rows(1)):
        raise RuntimeError("no sampler")
    assert len(steps) == 0
    steps.add_unsampled("third", plan(1))
    with steps.sampling("third", sampling_rows(1)):
        pass
    steps.check_oldest("third")


def test_steps_that_are_too_large() -> None:
    steps: InFlight[str] = InFlight(INFO)
    with pytest.raises(AssertionError, match="T = 5"):
        steps.check_room(plan(5))
    with pytest.raises(AssertionError, match="L = 3"):
        steps.check_room(plan(3, 3))
