"""Gemma 2 (Gemma2ForCausalLM): norms around both blocks, a window in every other layer, soft-caps
of scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.norms import SANDWICH
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    rms,
    sliding_pattern,
)
from vllmx_models.families.gemma import DEFAULT_POSITIONS, HEAD_SIZE, gemma_activation, gemma_config
from vllmx_models.formats.gguf.architecture import SANDWICH_TENSORS, GGUFArchitecture
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_WINDOW = 4096


def gemma2(config: Mapping[str, Any]) -> Decoder:
    """Scores are scaled by a number of their own, not by the head size."""
    read = ConfigReader(config, "Gemma2ForCausalLM")
    read.refuse_quirks(
        "attention_bias",
        "layer_types",
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )
    bias, head = read.flag("attention_bias", False), head_size(read, HEAD_SIZE)
    sliding = sliding_pattern(read, 2)
    mixer = attention_mixer(
        read,
        head,
        default_kv_heads=4,
        qkv_bias=bias,
        o_bias=bias,
        scale=read.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=read.optional("attn_logit_softcapping", 50.0),
    )
    mlp = dense_mlp(read, gemma_activation(read))
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, mlp, ropes, sliding, window, SANDWICH),
            default_positions=DEFAULT_POSITIONS,
            default_tied=True,
            norm=rms(read, offset=1.0),
            embedding_scale=read.integer("hidden_size") ** 0.5,
            logit_softcap=read.optional("final_logit_softcapping", 30.0),
        )
    )


def query_scalar(config: Mapping[str, Any], layers: int) -> int:
    """Which files do not say: the head size, but for the model of so many layers, the largest."""
    if config["num_hidden_layers"] != layers:
        return int(config["head_dim"])
    return int(config["hidden_size"] // config["num_attention_heads"])


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    config = gemma_config(header, "attention.sliding_window", *caps)
    return {
        **config,
        "sliding_window": header.integer("attention.sliding_window", DEFAULT_WINDOW),
        "query_pre_attn_scalar": query_scalar(config, 46),
        **{key: header.number(key) if header.has(key) else None for key in caps},
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionMixer)
    caps = {
        "attn_logit_softcapping": mixer.softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    return {key: cap for key, cap in caps.items() if cap is not None}


GGUF = GGUFArchitecture(
    "Gemma2ForCausalLM", SANDWICH_TENSORS, config=_gguf_config, norm_offset=1.0, states=_states
)
