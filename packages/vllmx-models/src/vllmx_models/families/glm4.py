"""GLM-4-0414 and GLM-Z1, dense (Glm4ForCausalLM): norms around both blocks, half of each head
rotated, neighbouring dimensions together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
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
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS, GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 131072
NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def glm4(config: Mapping[str, Any]) -> Decoder:
    """`post_attention_layernorm` is the norm before the MLP, as in Llama."""
    read = ConfigReader({"partial_rotary_factor": 0.5, **config}, "Glm4ForCausalLM")
    read.refuse_quirks("attention_bias", "partial_rotary_factor")
    head, sliding = head_size(read, 128), [False] * num_layers(read)
    mixer = attention_mixer(
        read,
        head,
        default_kv_heads=2,
        qkv_bias=read.flag("attention_bias", True),
        interleaved=True,
    )
    mlp = dense_mlp(read, names=MLPNames(gate_up="gate_up_proj"))
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, mlp, ropes, sliding, None, NORMS)
    norm = Norm(read.number("rms_norm_eps", 1.5625e-07))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm))


_TENSORS: Mapping[str, str] = {
    **{name: one for name, one in DECODER_TENSORS.items() if name != "blk.{}.ffn_gate"},
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in header.tensors
    return {"partial_rotary_factor": 1.0, **decoder_config(header), "attention_bias": bias}


GGUF = GGUFArchitecture("Glm4ForCausalLM", _TENSORS, config=_gguf_config)
