"""EAGLE-3 drafters (arXiv:2503.01840): a layer or more over three hidden states of the target and
the embedding of the next id (LlamaForCausalLMEagle3 of SafeAILab and SpecForge, `speculators`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Array, Ops, StepInputs, Weight
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.configs.drafter import DrafterConfig, layer_ids
from vllmx_models.trunks.drafter import Drafter

_FLAGS = ("fc_norm", "norm_before_residual", "norm_output")
_NOT_SERVED = ("norm_before_fc", "parallel_drafting")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3(Drafter):
    """A drafted token reads the drafter's own hidden state in place of the target's."""

    flags: frozenset[str] = frozenset()
    """fc_norm: each hidden state of the target has a norm; norm_before_residual: the stream begins
    with the norm of the joined states; norm_output: a drafted token reads the hidden state behind
    the last norm."""

    def norm_weights(self) -> tuple[WeightSpec, ...]:
        names = {}
        if "norm_before_residual" in self.flags:
            names["hidden_norm"] = "layers.0.hidden_norm"
        if "fc_norm" in self.flags:
            names |= {f"fc_norm.{index}": f"fc_norm.{index}" for index in range(self.own_part)}
        norm, size = self.spec.norm, self.spec.hidden_size
        return tuple(one for pair in names.items() for one in norm.weights(*pair, size))

    def state(self, ops: Ops, w: Mapping[str, Weight], x: Array, index: int) -> Array:
        if "fc_norm" not in self.flags:
            return x
        return self.spec.norm.record(ops, x, w, f"fc_norm.{index}")

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        embedded = ops.embedding(step.tokens, w["embed"])  # (T, E)
        x = self.joined(ops, w, step, embedded)
        x = ops.place(x, step, self.own_part, own=True)
        if "norm_before_residual" in self.flags:
            x = self.spec.norm.record(ops, x, w, "hidden_norm")
        stream = self.through_layers(ops, w, step, x, embedded)
        x, normed = stream.read(), stream.normed("norm")
        ops.write(normed if "norm_output" in self.flags else x, self.own_part)
        return self.logits(ops, w, step, normed)


def eagle3(config: Mapping[str, Any]) -> Eagle3:
    """Layers of Llama, or of Qwen3 where `transformer_layer_config` says so."""
    found = DrafterConfig(config, "LlamaForCausalLMEagle3", "eagle3")
    read, count = found.read, found.num_target_layers
    eagle = read.part("eagle_config")
    found.refuse(*_NOT_SERVED)
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "is not served: EAGLE-3 reads several states")
    points = layer_ids(read, _LAYER_IDS) or layer_ids(eagle, _LAYER_IDS)
    points = points or [2, count // 2, count - 3]
    flags = frozenset(key for key in _FLAGS if read.flag(key, False))
    spec = found.decoder(qk_norm=read.config.get("model_type") == "qwen3")
    first, *others = spec.layers
    assert isinstance(first.mixer, AttentionMixer)
    norms = LayerNorms(None if "norm_before_residual" in flags else "hidden_norm")
    first = replace(first, mixer=replace(first.mixer, embedded=spec.norm), norms=norms)
    spec = replace(spec, layers=(first, *others))
    made = Eagle3(spec, found.draft_spec(points), found.num_ids)
    made.flags = flags
    return made
