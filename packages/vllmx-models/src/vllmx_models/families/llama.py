"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models in their layout (LlamaForCausalLM,
arXiv:2302.13971): pre-norm decoders with RMS norms, RoPE, grouped-query attention and SwiGLU."""

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
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    INTERLEAVED,
    MIXTRAL_TENSORS,
    GGUFArchitecture,
    decoder_config,
    mixtral_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 2048


def llama(config: Mapping[str, Any]) -> Decoder:
    """Grouped-query attention, optional biases, any RoPE scaling."""
    read = ConfigReader(config, "LlamaForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias")
    bias = read.flag("attention_bias", False)
    head, sliding = head_size(read), [False] * num_layers(read)
    mixer = attention_mixer(read, head, qkv_bias=bias, o_bias=bias)
    mlp = dense_mlp(read, bias=read.flag("mlp_bias", False))
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, mlp, ropes, sliding, None)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Mistral and Mixtral share the architecture llama in files: experts identify Mixtral, a window
    Mistral."""
    config = decoder_config(header, "attention.sliding_window", "expert_count")
    if header.integer("expert_count", 0, low=0):
        window = header.integer("attention.sliding_window", 0, low=0) or None
        return config | mixtral_config(header) | {"sliding_window": window}
    if header.integer("attention.sliding_window", 0, low=0):
        window = header.integer("attention.sliding_window")
        return config | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


GGUF = GGUFArchitecture(
    "LlamaForCausalLM", {**DECODER_TENSORS, **MIXTRAL_TENSORS}, INTERLEAVED, _gguf_config
)
