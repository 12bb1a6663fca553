"""Qwen3, dense (Qwen3ForCausalLM): Qwen2's layers with norms on the query and key heads instead of
biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    rms,
)
from vllmx_models.families.qwen2 import DEFAULT_POSITIONS, WINDOW_KEYS, qwen_layers
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
)
from vllmx_models.trunks.decoder import Decoder


def qwen3(config: Mapping[str, Any]) -> Decoder:
    """The head size is a value of its own: 128 where config.json has none."""
    read = ConfigReader(config, "Qwen3ForCausalLM")
    read.refuse_quirks("attention_bias", *WINDOW_KEYS)
    bias = read.flag("attention_bias", False)
    mixer = attention_mixer(
        read, head_size(read, 128), qk_norm=rms(read), qkv_bias=bias, o_bias=bias
    )
    layers = qwen_layers(read, mixer, dense_mlp(read))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


GGUF = GGUFArchitecture("Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS})
