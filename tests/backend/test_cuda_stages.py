"""Stages of the CUDA backend without a GPU: an emulated device each, on threads of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel
from vllmx_core.plan import F32
from vllmx_core.sharding.stages import staged
from vllmx_cuda.backend import CudaBackend
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_tp.pipeline import InnerStage

from .cuda_models import _can_emulate
from .test_cuda_ranks import EMULATOR, Watched, load, options
from .test_stage_ranks import alone, check, on_ranks
from .test_stages import CONFIGS, TEXT, of

__all__ = ["_can_emulate"]  # a fixture
STEPS = [(0, 9), (9, 10), (10, 11), (11, 12)]
"""A prompt, and tokens behind it, of which the graphs' second uses are replays."""
Stage = tuple[LoadedModel, Watched]


def stages_of(
    name: str,
    count: int,
    dtype: str,
    *,
    capture_s: tuple[float, ...] = (),
    rows: int = 2,
    **how: Any,
) -> RankThreads[Stage]:
    model, source = of(CONFIGS[name])

    def make(end: ThreadCommunicator) -> Stage:
        mine = staged(model, source, options(dtype), end.rank, count)
        device = Watched(emulator=EMULATOR, **how)
        seconds = capture_s[end.rank] if capture_s else 0
        backend = CudaBackend(lambda: device, tune_s=0, capture_s=seconds)
        loaded: LoadedModel = backend.load(
            mine, source, replace(options(dtype, communicator=end), max_num_seqs=rows)
        )
        return loaded if end.rank == count - 1 else InnerStage(loaded), device

    return RankThreads(count, make)


def text(stage: Stage) -> F32 | None:
    """(T, V) of the steps; nothing of an inner stage."""
    found = []
    for begin, end in STEPS:
        plan = make_plan([Row(TEXT[begin:end], begin, [3], "all", 0)], 16)
        count = plan.num_logit_rows
        whole = np.arange(count, dtype=np.int32)
        rows = sampling_rows(count, num_logprobs=0, whole=whole)
        found.append(stage[0].step(plan, rows).result().logits)
    if isinstance(stage[0], InnerStage):
        return None
    return np.concatenate([logits for logits in found if logits is not None])


@pytest.mark.parametrize(
    ("name", "count", "dtype", "how"),
    [
        ("TestLlama", 2, "f32", {}),
        ("TestQwen3Next", 3, "f32", {"deferred": True}),
        ("tied", 2, "bf16", {}),
    ],
)
def test_stages_together_equal_one(name: str, count: int, dtype: str, how: dict[str, Any]) -> None:
    """The same kernels on the same values in the same order: the same bits."""
    model, source = of(CONFIGS[name])
    expected = text(load(model, source, options(dtype)))
    stages = stages_of(name, count, dtype, **how)
    *inner, found = stages.each(text)
    assert inner == [None] * (count - 1)
    np.testing.assert_array_equal(found, expected)
    stages.each(lambda stage: stage[0].close())
    stages.close()


def test_what_stages_hand_on_lies_in_the_captured_step() -> None:
    """A step of three rows is padded to four by both, or one would wait for what the other does
    not send."""
    stages = stages_of("TestLlama", 2, "f32", rows=4)
    plan = make_plan([Row([token], 0, [token], "all") for token in (1, 2, 0)], 16)

    def work(stage: Stage) -> list[str]:
        model, device = stage
        device.ranks.asked.clear()
        for _ in range(2):
            model.step(plan, sampling_rows(3)).result()
        before = device.calls.copy()
        model.step(plan, sampling_rows(3)).result()
        spent = device.calls - before
        assert spent["graph"] == (1 if isinstance(model, InnerStage) else 2)
        assert not spent["send"]
        assert not spent["recv"]
        return device.ranks.asked

    first, second = stages.each(work)
    count = 4 * CONFIGS["TestLlama"]["hidden_size"]
    assert first == [f"send {count} f32"] * 4
    assert second == [f"recv {count} f32"] * 4
    stages.each(lambda stage: stage[0].close())
    stages.close()


@pytest.mark.parametrize("seconds", [(0.0, 1e9), (1e9, 0.0)])
def test_stages_capture_as_many_buckets_as_the_first(seconds: tuple[float, float]) -> None:
    stages = stages_of("TestLlama", 2, "f32", capture_s=seconds)
    counts = stages.each(lambda stage: stage[1].ranks.asked)
    assert len(counts[0]) == len(counts[1]) == (8 if seconds[0] else 0)
    stages.each(lambda stage: stage[0].close())
    stages.close()


class EmulatedBackend(CudaBackend):
    """A device of its own for each model."""

    def __init__(self) -> None:
        super().__init__(lambda: EmulatedDevice(emulator=EMULATOR), tune_s=0, capture_s=0)


def test_two_stages_of_two_ranks() -> None:
    """They meet and hand on through shared memory, as processes do before NCCL knows them. Without
    stages a step like one with drafts is padded, and its products add up in another order."""
    found = on_ranks(EmulatedBackend, CONFIGS["tied"], 2, 2)
    check(found, on_ranks(EmulatedBackend, CONFIGS["tied"], 1, 2), 2e-6)
    check(found, alone(EmulatedBackend, CONFIGS["tied"]), 2e-5)
