"""Command R7B and Command A (Cohere2ForCausalLM): Cohere's layers, three of four with a window and
rotated, the others neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.norms import PARALLEL
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    sliding_pattern,
)
from vllmx_models.families.cohere import (
    COHERE_TENSORS,
    DEFAULT_POSITIONS,
    cohere_decoder,
    cohere_states,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_WINDOW = 4096


def cohere2(config: Mapping[str, Any]) -> Decoder:
    """Layers without a window have no position embedding."""
    read = ConfigReader(config, "Cohere2ForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window", "logit_scale")
    bias, head = read.flag("attention_bias", False), head_size(read)
    sliding = sliding_pattern(read, read.integer("sliding_window_pattern", 4))
    window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    mixer = attention_mixer(read, head, qkv_bias=bias, o_bias=bias, interleaved=True)
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    used = [rope if slides else None for rope, slides in zip(ropes, sliding, strict=True)]
    layers = layer_specs(read, mixer, dense_mlp(read), used, sliding, window, PARALLEL)
    return cohere_decoder(read, layers)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The config that a GGUF file stands for. The file does not say that each fourth layer has no
    window."""
    return {
        **decoder_config(header, "logit_scale", "attention.sliding_window"),
        "logit_scale": header.number("logit_scale", 0.0625),
        "sliding_window": header.integer("attention.sliding_window", DEFAULT_WINDOW),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


GGUF = GGUFArchitecture(
    "Cohere2ForCausalLM", COHERE_TENSORS, config=_gguf_config, states=cohere_states
)
