"""How many experts of a layer a step uses, which decides how many bytes it reads: counted with the
tokens that are measured, beside what uniform routing would use.

The first layer with experts is run up to its router, whose scores take the place of logits; those
of the other layers are not counted, and groups and biases that a choice may have are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.checkpoint import build_model, open_checkpoint
from vllmx_core.model import ModelShape
from vllmx_core.plan import AnyArray
from vllmx_core.registry import load_registry
from vllmx_core.testing.plans import Row, make_plan, sampling_rows
from vllmx_core.weights import WeightSpec
from vllmx_models.blocks.layer import LayerScope
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.norms import ResidualStream
from vllmx_models.decoder import Decoder

from cpu_peers.cases import Case

BLOCK = 16
NUM_IDS = 1000
"""The number of ids of which the tokens are drawn, as those that are measured."""
_STEPS = 4
_BEHIND = ("experts.", "gate_up", "down", "choice_bias", "shared_gate", "mlp_post_norm")
"""Weights of a layer that its router does not need."""


class FirstRouter:
    """A `Model` whose logits are the scores of the experts of the first layer that has some."""

    def __init__(self, decoder: Decoder) -> None:
        layers = decoder.spec.layers
        self.layer = next(
            n for n, layer in enumerate(layers) if isinstance(layer.feed_forward, MoE)
        )
        found = layers[self.layer].feed_forward
        assert isinstance(found, MoE)
        self.moe = found
        self._trunk = Decoder(replace(decoder.spec, layers=layers[: self.layer + 1]))

    @property
    def shape(self) -> ModelShape:
        return replace(self._trunk.shape, vocab_size=self.moe.count)

    def weights(self) -> tuple[WeightSpec, ...]:
        last = f"layers.{self.layer}."
        return tuple(
            spec
            for spec in self._trunk.trunk_weights()
            if not spec.name.removeprefix(last).startswith(_BEHIND)
            and not spec.name.startswith("norm")
        )

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return self._trunk.constants(max_model_len)

    def forward(self, ops: Any, w: Mapping[str, Any], step: Any) -> Any:
        trunk, spec = self._trunk, self._trunk.spec
        x = ops.embedding(step.tokens, w["embed"])
        stream = ResidualStream(ops, w, spec.norm, x)
        for number, layer in enumerate(spec.layers):
            scope = LayerScope(ops, w, step, number, number, 0, trunk._tables, x)
            if number < self.layer:
                trunk._layer(layer, stream, scope)
        trunk._mix(layer, stream, scope)
        read = trunk._read("mlp_norm", layer.norms.named, stream, scope)
        return ops.logits(read, step.logit_rows, w[f"layers.{self.layer}.router"])


def uniform(experts: int, chosen: int, tokens: int) -> float:
    """The mean number of experts that so many tokens use, each of which draws `chosen` others."""
    return float(experts * (1 - (1 - chosen / experts) ** tokens))


def experts_used(model: Path, cases: Sequence[Case], backend: str = "cpu") -> str | None:
    """A line for each case; None for a model without experts, or of another kind."""
    most = max(_tokens(case) for case in cases)
    registry = load_registry()
    checkpoint = open_checkpoint(registry, model)
    try:
        decoder = build_model(registry, checkpoint)
        if not isinstance(decoder, Decoder) or not any(
            isinstance(layer.feed_forward, MoE) for layer in decoder.spec.layers
        ):
            return None
        router = FirstRouter(decoder)
        options = LoadOptions(
            max_model_len=BLOCK,
            max_num_seqs=most,
            max_num_batched_tokens=most,
            block_size=BLOCK,
            num_kv_blocks=most,
        )
        spec, _ = registry.choose_backend(backend)
        loaded = spec.load()().load(router, checkpoint.weights, options)
    finally:
        checkpoint.weights.close()
    count, chosen = router.moe.count, router.moe.router.route.chosen
    lines = [f"experts used a step, of {count}: counted in layer {router.layer} (uniform)"]
    for case in cases:
        found = np.mean([_counted(loaded, _tokens(case), chosen, seed) for seed in range(_STEPS)])
        lines.append(f"{case.label}: {found:.0f} ({uniform(count, chosen, _tokens(case)):.0f})")
    loaded.close()
    return "\n".join(lines)


def _tokens(case: Case) -> int:
    return case.context if case.kind == "prefill" else case.batch


def _counted(loaded: LoadedModel, tokens: int, chosen: int, seed: int) -> int:
    """How many experts are among the best of any of so many random tokens."""
    ids = np.random.default_rng(seed).integers(NUM_IDS, size=tokens)
    rows = [Row([int(one)], 0, [number], "all") for number, one in enumerate(ids)]
    sampling = sampling_rows(tokens, num_logprobs=chosen)
    logprobs = loaded.step(make_plan(rows, BLOCK), sampling).result().logprobs
    assert logprobs is not None
    return len(np.unique(logprobs.top_ids))
