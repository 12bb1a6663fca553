"""StableLM 3B, 2 1.6B and 2 12B (StableLmForCausalLM): layer norms with biases, and a quarter of
each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.norms import PARALLEL, PRE, Norm
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
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 4096
NAMES = AttentionNames(q_norm="q_layernorm.norms.{}", k_norm="k_layernorm.norms.{}")


def stablelm(config: Mapping[str, Any]) -> Decoder:
    """The 12B runs its blocks in parallel and has a norm for each query and key head."""
    read = ConfigReader({"partial_rotary_factor": 0.25, **config}, "StableLmForCausalLM")
    read.refuse_quirks("partial_rotary_factor", "qk_layernorm")
    eps, head = read.number("layer_norm_eps", 1e-5), head_size(read)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(
        read,
        head,
        default_kv_heads=32,
        qkv_bias=read.flag("use_qkv_bias", False),
        qk_norm=Norm(eps, "layer") if read.flag("qk_layernorm", False) else None,
        norm_weights="each",
        names=NAMES,
    )
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    places = PARALLEL if read.flag("use_parallel_residual", False) else PRE
    layers = layer_specs(read, mixer, dense_mlp(read), ropes, sliding, None, places)
    norm = Norm(eps, "layer", bias=True)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm))


_ATTENTION = "model.layers.{}.self_attn"
_TENSORS: Mapping[str, str] = {
    **DECODER_TENSORS,
    "blk.{}.attn_q_norm": f"{_ATTENTION}.q_layernorm.norms.{{}}",
    "blk.{}.attn_k_norm": f"{_ATTENTION}.k_layernorm.norms.{{}}",
}
"""Files fuse the norms of a layer's heads into one tensor."""


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return {
        "partial_rotary_factor": 1.0,
        **decoder_config(header, "use_parallel_residual"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    return {"use_parallel_residual": spec.layers[0].norms.parallel}


GGUF = GGUFArchitecture("StableLmForCausalLM", _TENSORS, config=_gguf_config, states=_states)
