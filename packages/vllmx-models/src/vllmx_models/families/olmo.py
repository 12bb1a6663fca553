"""OLMo 2 and 3 (Olmo2ForCausalLM, Olmo3ForCausalLM).

Unlike Llama they normalise the output of each block instead of its input, and the queries (and
keys) of all heads with one RMS norm (arXiv:2501.00656). OLMo 3 adds a sliding window to three of
four layers; these keep the unscaled RoPE when the context is extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.norms import POST, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    scaled_where_full,
    sliding_pattern,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 2048
OLMO3_THETA = 500_000.0
OLMO3_WINDOW = 4096


def olmo2(config: Mapping[str, Any]) -> Decoder:
    """Full attention in every layer."""
    read = ConfigReader(config, "Olmo2ForCausalLM")
    read.refuse_quirks("attention_bias")
    return _decoder(read, read, [False] * num_layers(read), None)


def olmo3(config: Mapping[str, Any]) -> Decoder:
    """Sliding layers keep the RoPE that they were pretrained with."""
    read = ConfigReader(config, "Olmo3ForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window")
    sliding = sliding_pattern(read, 4)
    window = read.integer("sliding_window", OLMO3_WINDOW, high=1 << 31)
    theta = read.number("rope_theta", OLMO3_THETA)
    return _decoder(read, scaled_where_full(read, theta, theta), sliding, window)


def _decoder(
    read: ConfigReader, by_type: ConfigReader, sliding: list[bool], window: int | None
) -> Decoder:
    """The decoder of both; `by_type` reads the RoPE of each layer type."""
    bias, head = read.flag("attention_bias", False), head_size(read)
    norm = Norm(read.number("rms_norm_eps", 1e-5))
    mixer = attention_mixer(
        read, head, qkv_bias=bias, o_bias=bias, qk_norm=norm, norm_weights="across"
    )
    ropes = layer_ropes(by_type, head, sliding, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, dense_mlp(read), ropes, sliding, window, POST)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm))


_PLACES = ("blk.{}.attn_norm", "blk.{}.ffn_norm")
POST_TENSORS: Mapping[str, str] = {
    **{name: module for name, module in DECODER_TENSORS.items() if name not in _PLACES},
    **HEAD_NORM_TENSORS,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
"""The tensors of layers with norms behind the blocks and on heads."""


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files with a window are OLMo 3: both share the architecture olmo2."""
    pattern = "attention.sliding_window_pattern"
    config = decoder_config(header, "attention.sliding_window", pattern)
    window = header.integer("attention.sliding_window", 0, low=0)
    if not window:
        return config
    slides = header.flags(pattern, config["num_hidden_layers"])
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        **config,
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": [kinds[one] for one in slides],
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    mixers = [layer.mixer for layer in spec.layers]
    slides = [isinstance(one, AttentionMixer) and one.window is not None for one in mixers]
    return {"attention.sliding_window_pattern": np.array(slides)} if any(slides) else {}


GGUF = GGUFArchitecture("Olmo2ForCausalLM", POST_TENSORS, config=_gguf_config, states=_states)
