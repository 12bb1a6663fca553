"""Models that see images on the CUDA backend without a GPU, against transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.program import tower as tower_module
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.plans import sampling_rows

from tests.integration.image_models import FAMILIES, Family, save
from tests.integration.test_image_models import REGISTRY, plans, prompt

from .cuda_models import _can_emulate
from .test_cuda_emulated import LaunchingDevice

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def oracle(family: Family) -> Any:
    return family.make()


@pytest.fixture(scope="module")
def given(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model and its weights."""
    checkpoint = open_checkpoint(REGISTRY, save(oracle, tmp_path_factory.mktemp("images")))
    return REGISTRY.model_for(checkpoint.config).load()(checkpoint.config), checkpoint.weights


def load(given: tuple[Any, Any], dtype: str, device: EmulatedDevice) -> Any:
    limits = LoadOptions(
        dtype=dtype,
        max_model_len=128,
        num_kv_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        encoder_cache_bytes=0,
        enforce_eager=isinstance(device, CountingDevice),  # which sees no launch of a graph
    )
    return CudaBackend(lambda: device, capture_s=0).load(*given, limits)


def answers(loaded: Any, steps: list[Any]) -> np.ndarray:
    found = []
    for plan in steps:
        rows = sampling_rows(plan.num_logit_rows)
        rows.whole = np.arange(plan.num_logit_rows, dtype=np.int32)
        rows.num_logprobs[:] = 0
        rows.max_logprobs = 0
        found.append(loaded.step(plan, rows).result().logits)
    return np.concatenate(found)


CUT = [5, 3, 1, 40]
SEEN = {"qwen3_vl": CUT, "gemma3": [4, 9, 40]}
SEEN |= dict.fromkeys(("qwen2_5_vl", "internvl", "llava", "mistral3", "glm4v", "qwen2_vl"), CUT)


@pytest.mark.parametrize("family", SEEN, indirect=True)
def test_logits(family: Family, oracle: Any, given: tuple[Any, Any], request: Any) -> None:
    """Chunks, a decode step, and a pass of the tower in parts with a step between them."""
    images = [family.image(2, 4, 3)]
    ids = [*prompt(images, family.merge, family.breaks)[0], 11, 12]
    model, loaded = given[0], load(given, "f32", EmulatedDevice(emulator=EMULATOR))
    tower, steps = plans(model, ids, images, SEEN[request.node.callspec.params["family"]])
    try:
        for begin, end in pairwise([0.0, 0.01, 0.5, 1.0]):
            loaded.encode(tower, begin, end)
            answers(loaded, steps[:1])
        found, wanted = answers(loaded, steps), family.logits(oracle, ids, images)
    finally:
        loaded.close()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-5


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "internvl"], indirect=True)
def test_tensor_cores(family: Family, oracle: Any, given: tuple[Any, Any]) -> None:
    """Spans and windows of images in tiles: coarse, but no garbage."""
    images = [family.image(6, 6, 2)]
    ids, (model, _) = prompt(images)[0], given
    device = LaunchingDevice(emulator=EMULATOR)
    loaded = load(given, "bf16", device)
    tower, steps = plans(model, ids, images, [64])
    try:
        loaded.encode(tower)
        found, wanted = answers(loaded, steps), family.logits(oracle, ids, images)
    finally:
        loaded.close()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 0.05
    assert "paged_prefill" in device.launched
    assert "paged_decode" not in device.launched


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_several_images(
    family: Family, oracle: Any, given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images have no room together, and one alone is larger than that; the device does nothing
    before somebody waits, and the pass is overwritten by then."""
    monkeypatch.setattr(tower_module, "PASS_PATCHES", 16)
    images = [family.image(*size) for size in ((2, 4, 0), (2, 4, 1), (4, 6, 2), (2, 2, 3))]
    ids, (model, _) = prompt(images)[0], given
    loaded = load(given, "f32", EmulatedDevice(emulator=EMULATOR, deferred=True))
    tower, steps = plans(model, ids, images, [64])
    try:
        loaded.encode(tower)
        tower.patches.values[...] = tower.patches.keep[...] = 0
        found, wanted = answers(loaded, steps), family.logits(oracle, ids, images)
    finally:
        loaded.close()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-5


class CountingDevice(EmulatedDevice):
    """A device whose clock tells how much was launched and copied."""

    def event(self) -> Any:
        return Moment(self.calls["launch"] + self.calls["copy"] + self.calls["multiply"])


class Moment:
    def __init__(self, time: int) -> None:
        self.time = time

    def wait(self) -> None: ...

    def seconds_since(self, earlier: Moment) -> float:
        return self.time - earlier.time


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_a_step_has_the_time_of_the_passes_before_it(
    family: Family, given: tuple[Any, Any]
) -> None:
    images = [family.image(2, 4, 3)]
    loaded = load(given, "f32", CountingDevice(emulator=EMULATOR))
    tower, (step,) = plans(given[0], prompt(images)[0], images, [64])
    try:
        parts = []
        for share in (0.3, 1.0):
            loaded.encode(tower, 0.0, share)
            if share < 1.0:
                loaded.encode(tower, share, 1.0)
            rows = sampling_rows(step.num_logit_rows)
            parts.append([loaded.step(step, rows).result().elapsed_s for _ in range(2)])
    finally:
        loaded.close()
    assert parts[0] == parts[1], "whatever the parts"
    assert parts[0][0] > parts[0][1] > 0
