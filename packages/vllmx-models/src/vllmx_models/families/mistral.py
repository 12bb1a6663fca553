"""Mistral 7B, Nemo, Small, Large (MistralForCausalLM): every layer attends through one window, if
there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
)
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 4096 * 32
DEFAULT_WINDOW = 4096
"""transformers' value for a config without the key; null turns the window off."""


def mistral(config: Mapping[str, Any]) -> Decoder:
    """Llama's layout with a sliding window and its own defaults."""
    read = ConfigReader(config, "MistralForCausalLM")
    read.refuse_quirks("sliding_window")
    window = None
    if read.has("sliding_window") or "sliding_window" not in config:
        window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    head, sliding = head_size(read), [window is not None] * num_layers(read)
    # one rotation for all layers: the window is no layer type here
    ropes = layer_ropes(read, head, [False] * len(sliding), default_positions=DEFAULT_POSITIONS)
    mixer = attention_mixer(read, head, default_kv_heads=8)
    layers = layer_specs(read, mixer, dense_mlp(read), ropes, sliding, window)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))
