"""How many experts of a layer a step uses, which decides how many bytes it reads: counted with the
very steps that are measured, beside what uniform routing would use.

The model is run up to the router of one layer, whose scores take the place of logits; that is done
for the first, the middle and the last layer with experts. Groups and biases that a choice may have
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel
from vllmx_core.model import ModelShape
from vllmx_core.plan import AnyArray
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.spec import WeightSpec
from vllmx_models.blocks.layer import LayerScope
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.norms import ResidualStream
from vllmx_models.trunks.decoder import Decoder
from vllmx_testing.plans import sampling_rows

from cpu_peers.cases import Case
from cpu_peers.vllmx_step_worker import (
    DecodePlan,
    options_for,
    prefill_plan,
    with_slots,
    write_pages,
)

_STEPS = 4
_BEHIND = ("experts.", "gate_up", "down", "choice_bias", "shared_gate", "mlp_post_norm")
"""Weights of a layer that its router does not need."""


class Router:
    """A `Model` whose logits are the scores of the experts of one layer."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        self.layer, layers = layer, decoder.spec.layers
        found = layers[layer].feed_forward
        assert isinstance(found, MoE)
        self.moe = found
        self._trunk = Decoder(replace(decoder.spec, layers=layers[: layer + 1]))

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
            scope = LayerScope(ops, w, step, number, number, 0, trunk.tables, x)
            if number < self.layer:
                trunk.layer(layer, stream, scope)
        trunk._mix(layer, stream, scope)
        read = trunk._read("mlp_norm", layer.norms.named, stream, scope)
        return ops.logits(read, step.logit_rows, w[f"layers.{self.layer}.router"])


def uniform(experts: int, chosen: int, tokens: int) -> float:
    """The mean number of experts that so many tokens use, each of which draws `chosen` others."""
    return float(experts * (1 - (1 - chosen / experts) ** tokens))


def experts_used(model: Path, cases: Sequence[Case], backend: str = "cpu") -> str | None:
    """A line for each case; None for a model without experts, or of another kind."""
    registry = load_registry()
    found: dict[str, list[str]] = {case.label: [] for case in cases}
    checkpoint = open_checkpoint(registry, model)
    try:
        decoder = build_model(registry, checkpoint)
        if not isinstance(decoder, Decoder) or not (layers := _layers(decoder)):
            return None
        for layer in layers:
            router = Router(decoder, layer)
            spec, _ = registry.choose_backend(backend)
            loaded = spec.load()().load(router, checkpoint.weights, options_for(cases))
            write_pages(loaded)
            for case in cases:
                found[case.label].append(f"{_counted(loaded, case, router):.0f}")
            loaded.close()
    finally:
        checkpoint.weights.close()
    count, chosen = router.moe.count, router.moe.router.route.chosen
    named = ", ".join(map(str, layers))
    lines = [f"experts used a step, of {count}: counted in layers {named} (uniform)"]
    for case in cases:
        tokens = case.context if case.kind == "prefill" else case.batch
        expected = uniform(count, chosen, tokens)
        lines.append(f"{case.label}: {', '.join(found[case.label])} ({expected:.0f})")
    return "\n".join(lines)


def _layers(decoder: Decoder) -> list[int]:
    """The first, the middle and the last layer with experts."""
    layers = enumerate(decoder.spec.layers)
    found = [number for number, layer in layers if isinstance(layer.feed_forward, MoE)]
    return sorted({found[0], found[len(found) // 2], found[-1]}) if found else []


def _counted(loaded: LoadedModel, case: Case, router: Router) -> float:
    """The mean over steps of how many experts are among the best of any of its tokens."""
    chosen, used = router.moe.router.route.chosen, []
    plans = DecodePlan(case) if case.kind == "decode" else None
    for _ in range(_STEPS):
        plan = prefill_plan(case) if plans is None else plans.advance()
        every = np.arange(plan.num_tokens, dtype=np.int32)
        plan = with_slots(replace(plan, logit_rows=every), loaded)
        asked = sampling_rows(len(every), num_logprobs=chosen)
        logprobs = loaded.step(plan, asked).result().logprobs
        assert logprobs is not None
        used.append(len(np.unique(logprobs.top_ids)))
    return float(np.mean(used))
