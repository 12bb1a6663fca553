"""DFlash drafters (DFlashDraftModel of z-lab, `speculators`): layers of Qwen3 that draft a block of
tokens in one pass. Their keys and values at tokens of the context are those of a projection of the
target's hidden states; the last id and the mask tokens of the block attend to them and to each
other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Array, Ops, StepInputs, Weight
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.config import ConfigReader
from vllmx_models.configs.drafter import DrafterConfig, layer_ids
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.drafter import Drafter

_NOT_SERVED = ("attention_sink_bias", "use_swa", "add_swa_attention_sink_bias")


class DFlash(Drafter):
    """See the module's docstring."""

    def norm_weights(self) -> tuple[WeightSpec, ...]:
        return self.spec.norm.weights("hidden_norm", "hidden_norm", self.spec.hidden_size)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])  # (T, E)
        context = self.spec.norm.record(ops, self.joined(ops, w, step, x), w, "hidden_norm")
        ops.write(context, self.own_part)  # where each layer finds it
        stream = self.through_layers(ops, w, step, x, x)
        return self.logits(ops, w, step, stream.normed("norm"))


def dflash(config: Mapping[str, Any]) -> DFlash:
    """z-lab's ids of layers name those whose output is read, those of `speculators` whose input. A
    block attends in both directions, in layers with a window backwards, unless the config says
    otherwise."""
    name = "DFlashDraftModel"
    options = ConfigReader(config, name).part("dflash_config").config
    found = DrafterConfig({**config, **options}, name, "dflash")
    read = found.read
    found.refuse(*_NOT_SERVED)
    points = layer_ids(read, "aux_hidden_state_layer_ids") or layer_ids(read, "target_layer_ids", 1)
    block, from_last = read.integer("block_size", low=2), read.flag("sample_from_anchor", False)
    drafts = found.draft_spec(
        points,
        block=block if from_last else block - 1,
        mask_token=read.integer("mask_token_id", low=0),
        from_last=from_last,
    )

    def layer(spec: LayerSpec) -> LayerSpec:
        attention = spec.mixer
        assert isinstance(attention, AttentionMixer)
        causal = attention.window is not None and not read.flag("sliding_window_non_causal", False)
        causal = read.flag("is_causal", read.flag("causal", causal))
        mixer = replace(attention, spans=not causal, context=len(points))
        return replace(spec, mixer=mixer)

    spec = found.decoder("is_causal", qk_norm=read.flag("use_qk_norm", True))
    return DFlash(replace(spec, layers=tuple(map(layer, spec.layers))), drafts, found.num_ids)
