"""Captured steps of layers that decide on the device which experts a token goes to, and what
a sequence keeps. A replay has the launches of the first step and values of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import StepResult
from vllmx_cuda.backend import CudaBackend
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows

from . import test_latent_architectures, test_recurrent_architectures
from .cuda_models import QWEN3, _can_emulate
from .test_sharding import CONFIGS, of

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()
LAYERS: dict[str, dict[str, Any]] = {
    "experts": CONFIGS["experts with biases and sinks"],
    "states and experts": test_recurrent_architectures.TestQwen3Next.config,
    "latents": test_latent_architectures.TestDeepSeekV3.config,
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


DRAFTED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (LAYERS["experts"], "f32"),
    "states and experts": (LAYERS["states and experts"], "f32"),
    "latents": (LAYERS["latents"], "f32"),
    "tiles": (QWEN3, "bf16"),
}
LENGTHS = [(3, 3, 2), (1, 4, 3), (6, 1, 1), (2, 2, 2), (12, 1, 1)]
"""Tokens of rows in steps that verify drafts: those of one bucket, and some without any."""


def verified(loaded: LoadedModel, keeps: bool) -> list[StepResult]:
    """Verifies drafts and keeps all of their tokens but the last."""
    random = np.random.default_rng(3)
    free = iter(range(200))
    starts, states = [len(prompt) for prompt in PROMPTS], [next(free) for _ in PROMPTS]
    blocks = [[2 * row, 2 * row + 1] for row in range(len(PROMPTS))]
    found = []
    for lengths in (None, *LENGTHS):
        rows = []
        for row, prompt in enumerate(PROMPTS):
            if lengths is None:
                rows.append(Row(prompt, 0, blocks[row], state=states[row] if keeps else None))
                continue
            tokens = random.integers(0, 50, lengths[row]).tolist()
            start, state, after = starts[row], (states[row], states[row]), []
            if keeps and len(tokens) > 1:
                after = [next(free) for _ in tokens[1:]]
                state = states[row], next(free)
            drafted = Row(tokens, start, blocks[row], "all", state if keeps else None, after)
            rows.append(drafted)
            starts[row] += max(1, len(tokens) - 1)
            states[row] = after[-1] if after else states[row]
        plan = make_plan(rows, 16)
        count = plan.num_logit_rows
        columns = {"temperature": 0.8, "seed": np.arange(count), "num_logprobs": 0}
        found.append(loaded.step(plan, sampling_rows(count, **columns)).result())
    return found


@pytest.mark.parametrize(("config", "dtype"), DRAFTED.values(), ids=DRAFTED)
def test_replays_verify_drafts_as_launches_do(config: dict[str, Any], dtype: str) -> None:
    model, source = of(config)
    found: list[list[StepResult]] = []
    for is_captured in (False, True):
        device = EmulatedDevice(emulator=EMULATOR, deferred=True)
        backend = CudaBackend(lambda on=device: on, capture_s=0)
        limits = LIMITS | {"dtype": dtype, "max_num_batched_tokens": 24, "num_state_slots": 100}
        loaded = backend.load(model, source, LoadOptions(**limits))
        program = loaded._program
        assert program is not None
        assert bool(program.recorded.work.tiles) == (dtype == "bf16")
        assert program.recorded.mixed_buckets == (2, 8, 24)
        if not is_captured:
            program.recorded = replace(program.recorded, mixed_buckets=())
        found.append(verified(loaded, keeps=bool(model.shape.states)))
        assert len(program.graphs) == (4 if is_captured else 0), "of 8 tokens and of 24"
        loaded.close()
    near, share = (2e-4, 0.99) if dtype == "f32" else (0.02, 0.8)
    for launched, replayed in zip(*found, strict=True):
        assert launched.logprobs is not None
        assert replayed.logprobs is not None
        same = launched.ids == replayed.ids
        assert same.mean() > share
        chosen = replayed.logprobs.chosen[same]
        np.testing.assert_allclose(chosen, launched.logprobs.chosen[same], rtol=near, atol=near)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_replays_of_prompts_compute_what_launches_do(dtype: str) -> None:
    """Prompts in chunks, next to rows that decode: steps without logits and with some."""
    model, source = of(QWEN3)
    found, prompts = [], [list(range(3, 40)), [5], list(range(20, 33)), [9, 8]]
    for eager in (True, False):
        device = EmulatedDevice(emulator=EMULATOR, deferred=True)
        backend = CudaBackend(lambda on=device: on, capture_s=0)
        limits = LIMITS | {"dtype": dtype, "max_num_seqs": 4, "num_kv_blocks": 16}
        limits["max_num_batched_tokens"] = 24
        loaded = backend.load(model, source, LoadOptions(**limits, enforce_eager=eager))
        found.append(Driver(loaded, chunk=7, overlap=True).generate(prompts, 4))
        program = loaded._program
        assert program is not None
        assert (8 in {logits for _, logits in program._buckets}) != eager
        assert bool(len(program.graphs)) != eager
        loaded.close()
    assert found[0] == found[1]
