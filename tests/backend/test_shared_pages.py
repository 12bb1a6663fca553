"""An assistant's logits over the pages of its target are the same on all backends, CUDA's by its
emulator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend
from vllmx_core.model import Model, Tapped, TapSpec
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_models.families.gemma4 import gemma4
from vllmx_models.families.gemma4_assistant import gemma4_assistant
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.harness import all_logprobs
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource

from .cuda_models import _can_emulate
from .test_architectures import GEMMA4
from .test_heads import BACKENDS, options

__all__ = ["_can_emulate"]  # a fixture
TARGET = GEMMA4 | {"num_kv_shared_layers": 2}
ASSISTANT = TARGET | {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "target_config": TARGET,
}
TEXT = np.random.default_rng(4).integers(0, TARGET["vocab_size"], 21).tolist()
BLOCKS = [5, 2]


@cache
def models() -> tuple[Model, Model, ArraySource, ArraySource]:
    """A target, its assistant, and random tensors of each; the embedding is the target's."""
    target, assistant = gemma4(TARGET), gemma4_assistant(ASSISTANT)
    assistant.borrow(target, ())
    theirs, own = random_weights(target), random_weights(assistant, 1)
    arrays = {name: own.part(name).dequantize() for name in own.names()}
    arrays["model.embed_tokens.weight"] = theirs.part("model.embed_tokens.weight").dequantize()
    return target, assistant, theirs, ArraySource(arrays)


def drafted(backend: Backend) -> Any:
    """(2, V) log-probabilities behind a text, and behind a token that was drafted."""
    target, assistant, theirs, own_source = models()
    spec = assistant.shape.drafts
    assert spec is not None
    first = backend.load(Tapped(target, TapSpec(spec.points, spec.own, 64, 32)), theirs, options())
    hidden: Any = first.hidden  # type: ignore[attr-defined]
    second = backend.load(assistant, own_source, options(hidden=hidden, pages=hidden.pages))
    last, size, found = len(TEXT) - 2, TARGET["vocab_size"], []
    rows = np.arange(64, dtype=np.int32)[::-1][: last + 1]
    plan = make_plan([Row(TEXT[:-1], 0, BLOCKS, "all")], 16)
    all_logprobs(first, replace(plan, tap_rows=rows), size)
    own = np.array([7], np.int32)
    for token, features in ((TEXT[-1], rows[-1:]), (17, None)):
        plan = make_plan([Row([token], last, BLOCKS, "all")], 16)
        plan = replace(plan, feature_rows=features, tap_rows=own)
        plan = replace(plan, own_rows=own if features is None else None)
        found.append(all_logprobs(second, plan, size))
    second.close()
    first.close()
    return np.concatenate(found)


@pytest.mark.parametrize("name", [*BACKENDS, "cuda, emulated"])
def test_all_backends_read_the_pages(name: str, request: pytest.FixtureRequest) -> None:
    if name == "cuda, emulated":
        cuda = pytest.importorskip("vllmx_cuda.backend")
        device = EmulatedDevice()
        backend: Backend = cuda.CudaBackend(lambda: device, tune_s=0, capture_s=0)
    else:
        backend = load_registry().get(BackendSpec, name).load()()
    numpy = load_registry().get(BackendSpec, "numpy").load()()
    wanted = drafted(numpy)
    assert np.ptp(wanted) > 1
    assert np.abs(drafted(backend) - wanted).max() < 2e-5 * np.abs(wanted).max()
