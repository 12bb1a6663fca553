"""Draft logits of EAGLE-3 and DFlash equal the authors' formula, on all backends that run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.model import Model, Tapped, TapSpec
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_engine.core.drafter_files import (
    with_mask_embedding,
    with_target_config,
    with_target_weights,
)
from vllmx_engine.core.found_model import FoundModel
from vllmx_testing.harness import all_logprobs, log_softmax
from vllmx_testing.plans import Row, make_plan

from .served_models import SMALL
from .test_heads import BACKENDS, options

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..drafter_checkpoints import DFlashFormula, Eagle3Formula, dflash, eagle3  # noqa: TID252
from ..head_checkpoints import random_model  # noqa: TID252

CONFIG = SMALL | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
VOCAB_SIZE = CONFIG["vocab_size"]
TEXT = np.random.default_rng(4).integers(0, VOCAB_SIZE, 21).tolist()
CUTS = (0, 9, 10, 20)
"""Steps of the target; the last id of the text was drawn behind them."""
DRAFTED = (17, 40, 3)
BLOCKS = [5, 2]

EAGLES: dict[str, dict[str, Any]] = {
    "SafeAILab": {"ids": 23},
    "speculators": {"layer": "layers.0", "ids": 40, "flags": {"norm_before_residual": True}},
    "two layers of Qwen3": {"layer": "layers.0", "layers": 2, "model_type": "qwen3"},
    "own embedding, biases": {"own_embedding": True, "attention_bias": True},
    "EAGLE 3.1": {"layer": "layers.0", "flags": {"fc_norm": True, "norm_output": True}},
    "other layers": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}},
}
BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "z-lab": {"points": [1, 3, 5]},
    "a window": {"points": [2, 4], "window": 7, "layers": 3},
    "speculators": {"points": [1, 4], "from_speculators": True, "ids": 30},
    "an embedding of masks": {"points": [2, 5], "mask": True},
    "from the last id": {"points": [5], "from_speculators": True, "from_last": True},
}


class Target:
    """A random model, and its hidden states in float64."""

    def __init__(self, folder: Path) -> None:
        import torch

        model = random_model(CONFIG)
        model.save_pretrained(folder)
        self.folder = folder
        model = model.double()
        with torch.no_grad():
            found = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        self._states = [one[0].numpy() for one in found]
        self.embedding = model.model.embed_tokens.weight.detach().numpy()
        self.head = model.lm_head.weight.detach().numpy()

    def states(self, points: Any, count: int) -> Any:
        """(count, len(points) * E) of the first tokens of the text."""
        return np.concatenate([self._states[point][:count] for point in points], -1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target"))


def drafted(
    name: str, target: Target, folder: Path, run: Callable[[Any, Any, Model, TapSpec], Any]
) -> Any:
    """`run` with both models loaded on a backend."""
    registry = load_registry()
    theirs = open_checkpoint(registry, target.folder)
    model = build_model(registry, theirs)
    own = with_target_config(open_checkpoint(registry, folder), theirs.config)
    drafter: Any = build_model(registry, own)
    drafter.borrow(model, own.weights.names())
    found = FoundModel(EngineConfig(), target.folder, registry, progress=False)
    own = with_target_weights(found, own, drafter.borrowed.values())
    own = with_mask_embedding(own, drafter)
    spec = drafter.shape.drafts
    assert spec is not None
    taps = TapSpec(spec.points, spec.own, 64, 32)
    backend = registry.get(BackendSpec, name).load()()
    first = backend.load(Tapped(model, taps), theirs.weights, options())
    second = backend.load(drafter, own.weights, options(hidden=first.hidden))
    try:
        return run(first, second, drafter, taps)
    finally:
        second.close()
        first.close()
        own.weights.close()
        theirs.weights.close()


def agree(found: Any, logits: Any) -> None:
    wanted = log_softmax(logits)
    seen = np.isfinite(wanted)
    assert (np.isfinite(found) == seen).all()
    largest = np.abs(logits[np.isfinite(logits)]).max()
    assert np.abs(found[seen] - wanted[seen]).max() / largest < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", EAGLES)
def test_eagle3_equals_the_formula(target: Target, tmp_path: Path, backend: str, kind: str) -> None:
    formula = eagle3(tmp_path, CONFIG, target.embedding, **EAGLES[kind])

    def run(first: Any, second: Any, drafter: Model, taps: TapSpec) -> Any:
        found = []
        for begin, end in pairwise(CUTS):
            rows = np.arange(64, dtype=np.int32)[::-1][: end - begin]
            plan = make_plan([Row(TEXT[begin:end], begin, BLOCKS, "all")], 16)
            all_logprobs(first, replace(plan, tap_rows=rows), VOCAB_SIZE)
            plan = make_plan([Row(TEXT[begin + 1 : end + 1], begin, BLOCKS, "all")], 16)
            own = np.full(end - begin, -1, np.int32)
            own[-1] = 7
            plan = replace(plan, feature_rows=rows, tap_rows=own)
            found.append(all_logprobs(second, plan, VOCAB_SIZE))
        row = np.array([7], np.int32)
        for place, token in enumerate(DRAFTED, CUTS[-1]):
            plan = make_plan([Row([token], place, BLOCKS, "all")], 16)
            plan = replace(plan, own_rows=row, tap_rows=row)
            found.append(all_logprobs(second, plan, VOCAB_SIZE))
        return np.concatenate(found), taps.points

    found, points = drafted(backend, target, tmp_path, run)
    agree(found, _eagle_logits(formula, target, points))


def _eagle_logits(formula: Eagle3Formula, target: Target, points: Any) -> Any:
    tokens, x = TEXT[1:], formula.joined(target.states(points, len(TEXT) - 1))
    for token in DRAFTED:
        x = np.concatenate([x, formula.run(tokens, x)[0][-1:]])
        tokens = [*tokens, token]
    return formula.run(tokens, x)[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", BLOCK_DRAFTERS)
def test_dflash_equals_the_formula(target: Target, tmp_path: Path, backend: str, kind: str) -> None:
    """The context comes in steps, and a block follows the last one."""
    formula = dflash(tmp_path, CONFIG, target.embedding, target.head, **BLOCK_DRAFTERS[kind])
    count = 5

    def run(first: Any, second: Any, drafter: Model, taps: TapSpec) -> Any:
        spec = drafter.shape.drafts
        assert spec is not None
        for begin, end in pairwise(CUTS):
            rows = np.arange(64, dtype=np.int32)[::-1][: end - begin]
            plan = make_plan([Row(TEXT[begin:end], begin, BLOCKS, "all")], 16)
            all_logprobs(first, replace(plan, tap_rows=rows), VOCAB_SIZE)
            last = end == CUTS[-1]
            masks = (count if not spec.from_last else count - 1) if last else -1
            block = [TEXT[end], *[spec.mask_token] * masks] if last else []
            span = [(end, end + len(block))] if last else []
            row = Row([*TEXT[begin:end], *block], begin, BLOCKS, "all", spans=span)
            plan = make_plan([row], 16)
            outside = np.full(len(block), -1, np.int32)
            own = np.concatenate([np.arange(end - begin, dtype=np.int32), outside])
            plan = replace(
                plan,
                feature_rows=np.concatenate([rows, outside]),
                tap_rows=own,
                own_rows=own,
                visible_to=np.array(row.seen, np.int32),
            )
            found = all_logprobs(second, plan, VOCAB_SIZE)
        return found[-count:], taps.points

    found, points = drafted(backend, target, tmp_path, run)
    assert isinstance(formula, DFlashFormula)
    agree(found, formula.block(TEXT[-1], target.states(points, len(TEXT) - 1), count))
