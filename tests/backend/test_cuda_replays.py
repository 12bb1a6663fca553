"""Captured decode steps of layers that decide on the device which experts a token goes to, and what
a sequence keeps. A replay has the launches of the first step and values of its own."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_core.backend import LoadOptions
from vllmx_cuda.backend import CudaBackend
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.plans import Driver

from . import test_expert_architectures, test_recurrent_architectures
from .cuda_models import _can_emulate
from .test_sharding import CONFIGS, of

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()
LAYERS: dict[str, dict[str, Any]] = {
    "experts": CONFIGS["experts with biases and sinks"],
    "states and experts": test_recurrent_architectures.TestQwen3Next.config,
    "latents": test_expert_architectures.TestDeepSeekV3.config,
}
PROMPTS = [[5], [7, 11, 13], [2, 40]]
LIMITS: dict[str, Any] = {
    "dtype": "f32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "num_kv_blocks": 8,
}


@pytest.mark.parametrize("layers", LAYERS)
def test_replays_compute_what_launches_do(layers: str) -> None:
    """The device is as late as it may be: nothing may be read back in between."""
    model, source = of(LAYERS[layers])
    found = []
    for eager in (True, False):
        device = EmulatedDevice(emulator=EMULATOR, deferred=True)
        backend = CudaBackend(lambda on=device: on, capture_s=0)
        loaded = backend.load(model, source, LoadOptions(**LIMITS, enforce_eager=eager))
        ids = Driver(loaded, overlap=True).generate(PROMPTS, 6, temperature=0.8)
        found.append(ids)
        graphs = device.calls["graph"]
        loaded.close()
    assert found[0] == found[1]
    assert graphs >= 2 * 3, "a pass and its ids, once the first step of the size has run"
