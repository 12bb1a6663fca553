"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models in their layout (LlamaForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder
from vllmx_models.decoder_config import (
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
)

DEFAULT_POSITIONS = 2048


def llama(config: Mapping[str, Any]) -> Decoder:
    """Grouped-query attention, optional biases, any RoPE scaling."""
    read = ConfigReader(config, "LlamaForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias")
    bias = read.flag("attention_bias", False)
    head, sliding = head_size(read), [False] * num_layers(read)
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    return Decoder(
        decoder_spec(
            read,
            head,
            layer_specs(read, ropes, sliding, None),
            default_positions=DEFAULT_POSITIONS,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=read.flag("mlp_bias", False),
        )
    )
