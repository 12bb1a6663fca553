"""Phi-3, Phi-3.5 and Phi-4 without experts (Phi3ForCausalLM): q, k and v in one matrix, gate and up
in another, and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import Norm
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

DEFAULT_POSITIONS = 4096


def phi3(config: Mapping[str, Any]) -> Decoder:
    """A window, if set, applies to every layer; Phi-4-mini rotates part of each head."""
    read = ConfigReader(config, "Phi3ForCausalLM")
    read.refuse_quirks("sliding_window", "partial_rotary_factor")
    window = read.integer("sliding_window", high=1 << 31) if read.has("sliding_window") else None
    head, count = head_size(read), num_layers(read)
    mixer = attention_mixer(read, head, names=AttentionNames(qkv="qkv_proj"))
    mlp = dense_mlp(read, names=MLPNames(gate_up="gate_up_proj"))
    # one RoPE for all layers: the window is not a layer type here
    ropes = layer_ropes(read, head, [False] * count, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, mlp, ropes, [window is not None] * count, window)
    norm = Norm(read.number("rms_norm_eps", 1e-5))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm))


_PACKED: Mapping[str, str] = {
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
_APART = tuple(f"blk.{{}}.{name}" for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"))
_TENSORS = {name: one for name, one in DECODER_TENSORS.items() if name not in _APART} | {**_PACKED}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """A window of 0 means full attention."""
    config = decoder_config(header, "attention.sliding_window")
    window = header.integer("attention.sliding_window", 0, low=0)
    return config | {"sliding_window": window or None}


GGUF = GGUFArchitecture("Phi3ForCausalLM", _TENSORS, config=_gguf_config)
