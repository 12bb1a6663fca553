"""Layers of multi-token prediction equal the authors' formula, on all backends that run here."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.model import LAST_NORM, Model, Tapped, TapSpec, heads_of
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.weights.part import WeightSource
from vllmx_testing.harness import all_logprobs, log_softmax
from vllmx_testing.plans import Row, make_plan

from . import test_expert_architectures as experts
from . import test_latent_architectures as latent
from . import test_recurrent_architectures as recurrent

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..head_checkpoints import (  # noqa: TID252
    DEEPSEEK,
    MIMO,
    MIMO_V2,
    NEMOTRON,
    QWEN,
    Family,
    HeadCheckpoint,
    random_model,
    save_with_head,
)
from .served_models import SMALL

MIMO_CONFIG = SMALL | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
FAMILIES: dict[str, tuple[dict[str, Any], Family]] = {
    "Qwen3-Next": (recurrent.TestQwen3Next.config, QWEN),
    "Qwen3.5": (recurrent.TestQwen35.config, QWEN),
    "Qwen3.5 with experts": (recurrent.TestQwen35Moe.config, QWEN),
    "DeepSeek V3": (latent.TestDeepSeekV3.config, DEEPSEEK),
    "DeepSeek V3.2": (latent.TestDeepSeekV32.config, DEEPSEEK),
    "GLM-5": (latent.TestGlmMoeDsa.config, DEEPSEEK),
    "GLM-4.7-Flash": (latent.TestGlm4MoeLite.config, DEEPSEEK),
    "GLM-4.5": (experts.TestGlm4Moe.config, DEEPSEEK),
    "MiMo": (MIMO_CONFIG, MIMO),
    "MiMo-V2-Flash": (experts.TestMiMoV2Flash.config, MIMO_V2),
    "Nemotron 3": (recurrent.TestNemotronH.config, NEMOTRON),
}
BACKENDS = [
    spec.name for spec in load_registry().all(BackendSpec) if spec.unavailable_reason() is None
]
TEXT = np.random.default_rng(4).integers(0, 61, 21).tolist()
CUTS = (0, 9, 10, 20)
"""Steps of the target; the last id of the text was drawn behind them."""
NUM_DRAFTED = 3


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, HeadCheckpoint]:
    folder = tmp_path_factory.mktemp("heads")
    config, family = FAMILIES[request.param]
    return folder, save_with_head(folder, dict(config), family, random_model)


def opened(folder: Path) -> tuple[Checkpoint, Model, Model]:
    registry = load_registry()
    checkpoint = open_checkpoint(registry, folder)
    model = build_model(registry, checkpoint)
    heads: Any = heads_of(model)
    return checkpoint, model, heads.with_stored_head(checkpoint.weights)


def options(**more: Any) -> LoadOptions:
    return LoadOptions(
        dtype="f32", kv_cache_dtype="f32", max_model_len=64, block_size=16, num_kv_blocks=8,
        max_num_seqs=2, max_num_batched_tokens=32, num_threads=1, **more,
    )  # fmt: skip


def drafted(name: str, model: Model, heads: Model, source: WeightSource, token: int) -> Any:
    """(T, V) log-probabilities of the heads at each token of the text, then of drafted ones."""
    spec = heads.shape.drafts
    assert spec is not None
    taps, found = TapSpec(spec.points, spec.own, 64, 32), []
    backend = load_registry().get(BackendSpec, name).load()()
    state = 1 if model.shape.states else None
    target = backend.load(Tapped(model, taps), source, options())
    drafter = backend.load(heads, source, options(hidden=target.hidden))
    vocab_size = model.shape.vocab_size
    for begin, end in pairwise(CUTS):
        rows = np.arange(64, dtype=np.int32)[::-1][: end - begin]
        plan = make_plan([Row(TEXT[begin:end], begin, [5, 2], "all", state)], 16)
        all_logprobs(target, replace(plan, tap_rows=rows), vocab_size)
        plan = make_plan([Row(TEXT[begin + 1 : end + 1], begin, [5, 2], "all")], 16)
        own = np.full(end - begin, -1, np.int32)
        own[-1] = 7
        plan = replace(plan, feature_rows=rows, tap_rows=own)
        found.append(all_logprobs(drafter, plan, vocab_size))
    row = np.array([7], np.int32)
    for place in range(CUTS[-1], CUTS[-1] + NUM_DRAFTED - 1):
        plan = make_plan([Row([token], place, [5, 2], "all")], 16)
        plan = replace(plan, own_rows=row, tap_rows=row)
        found.append(all_logprobs(drafter, plan, vocab_size))
    drafter.close()
    target.close()
    return np.concatenate(found)


def test_heads_share_vocabulary_and_head(saved: tuple[Path, HeadCheckpoint]) -> None:
    """The matrices of their target, where the checkpoint has no copies for them."""
    checkpoint, model, heads = opened(saved[0])
    taps = TapSpec((LAST_NORM,), (48,), 64, 32)
    backend = load_registry().get(BackendSpec, "torch").load()()
    sizes = []
    with closing(backend.load(Tapped(model, taps), checkpoint.weights, options())) as target:
        for matrices in ({}, target.hidden.matrices):
            hidden = replace(target.hidden, matrices=matrices)
            loaded = backend.load(heads, checkpoint.weights, options(hidden=hidden))
            sizes.append(loaded.info.weight_bytes)
            loaded.close()
    checkpoint.weights.close()
    shared = 0 if saved[1].family.copies is not None else 2 * 61 * 48
    assert sizes[0] - sizes[1] == 4 * shared


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_equal_the_formula(saved: tuple[Path, HeadCheckpoint], backend: str) -> None:
    folder, oracle = saved
    states = oracle.hidden(TEXT[:-1])
    inputs = [oracle.inputs(*pair) for pair in zip(TEXT[1:], states, strict=True)]
    token = 17
    for _ in range(NUM_DRAFTED - 1):
        inputs.append(oracle.inputs(token, oracle.run(inputs)[0][-1]))
    logits = oracle.run(inputs)[1].numpy()
    checkpoint, model, heads = opened(folder)
    found = drafted(backend, model, heads, checkpoint.weights, token)
    checkpoint.weights.close()
    error = np.abs(found - log_softmax(logits)).max() / np.abs(logits).max()
    assert error < 2e-5
