"""Granite 3 and 4, dense (GraniteForCausalLM): Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import FeedForward
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
from vllmx_models.formats.gguf.architecture import INTERLEAVED, GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 2048
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
"""The multipliers of the embeddings, of what blocks add and of the scores, and what logits are
divided by."""


def granite(config: Mapping[str, Any]) -> Decoder:
    """Embeddings, scores and what blocks add are multiplied, logits are divided."""
    read = ConfigReader(config, "GraniteForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias", *MULTIPLIERS)
    return granite_decoder(read, dense_mlp(read, bias=read.flag("mlp_bias", False)))


def granite_decoder(read: ConfigReader, feed_forward: FeedForward) -> Decoder:
    """Layers of one feed-forward between the multipliers."""
    bias, head = read.flag("attention_bias", False), head_size(read)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(
        read, head, qkv_bias=bias, o_bias=bias, scale=read.number("attention_multiplier", 1.0)
    )
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, feed_forward, ropes, sliding, None),
            default_positions=DEFAULT_POSITIONS,
            embedding_scale=read.number("embedding_multiplier", 1.0),
            residual_scale=read.number("residual_multiplier", 1.0),
            logit_scale=1 / read.number("logits_scaling", 1.0),
        )
    )


def granite_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The keys of config.json; `honoured` as in `decoder_config`."""
    keys = "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    config = decoder_config(header, *keys, *honoured)
    embedding, residual, _, logits = keys
    return {
        **config,
        "embedding_multiplier": header.number(embedding, 1.0),
        "residual_multiplier": header.number(residual, 1.0),
        "attention_multiplier": header.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": header.number(logits, 1.0),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def granite_states(spec: DecoderSpec) -> dict[str, Any]:
    """What `granite_config` reads beside the keys of every decoder."""
    mixer = next(one for one in spec.mixers if isinstance(one, AttentionMixer))
    return {
        "embedding_scale": spec.embedding_scale,
        "residual_scale": spec.residual_scale,
        "attention.scale": mixer.scale,
        "logit_scale": 1 / spec.logit_scale,
    }


GGUF = GGUFArchitecture(
    "GraniteForCausalLM", interleaved=INTERLEAVED, config=granite_config, states=granite_states
)
