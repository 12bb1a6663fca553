"""Gemma and Gemma 2 (GemmaForCausalLM, Gemma2ForCausalLM).

Unlike Llama, all Gemmas scale embeddings by sqrt(E), store norm weights minus one, gate with GELU
and share the embedding with the output head (arXiv:2403.08295). Gemma 2 adds norms after both
blocks, a sliding window in every other layer, and soft caps on scores and logits
(arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.model import Activation

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
    num_layers,
    rms,
    sliding_pattern,
)
from vllmx_models.formats.gguf.architecture import (
    SANDWICH_TENSORS,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 8192
HEAD_SIZE = 256
GEMMA2_WINDOW = 4096


def gemma(config: Mapping[str, Any]) -> Decoder:
    """Full attention in every layer."""
    read = ConfigReader(config, "GemmaForCausalLM")
    read.refuse_quirks("attention_bias")
    bias, head = read.flag("attention_bias", False), head_size(read, HEAD_SIZE)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(read, head, default_kv_heads=16, qkv_bias=bias, o_bias=bias)
    mlp = dense_mlp(read, gemma_activation(read))
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, mlp, ropes, sliding, None),
            default_positions=DEFAULT_POSITIONS,
            default_tied=True,
            norm=rms(read, offset=1.0),
            embedding_scale=read.integer("hidden_size") ** 0.5,
        )
    )


def gemma_activation(read: ConfigReader) -> Activation:
    """The gate's activation. Early configs say gelu and mean the tanh approximation."""
    key = "hidden_activation" if read.has("hidden_activation") else "hidden_act"
    kind = read.activation(key, "gelu_pytorch_tanh")
    return "gelu_tanh" if kind == "gelu" else kind


def gemma_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The config.json of any Gemma's GGUF header; `honoured` as in `decoder_config`."""
    return decoder_config(header, *honoured) | {"hidden_act": "gelu_pytorch_tanh"}


GGUF = GGUFArchitecture("GemmaForCausalLM", config=gemma_config, norm_offset=1.0)


def gemma2(config: Mapping[str, Any]) -> Decoder:
    """Scores are scaled by `query_pre_attn_scalar` ** -0.5 instead of D ** -0.5."""
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
    window = read.integer("sliding_window", GEMMA2_WINDOW, high=1 << 31)
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
    """`query_pre_attn_scalar`, which GGUF files lack: the head size.

    The largest model, recognised by its `layers`, uses hidden_size / num_attention_heads."""
    if config["num_hidden_layers"] != layers:
        return int(config["head_dim"])
    return int(config["hidden_size"] // config["num_attention_heads"])


def _gemma2_config(header: GGUFHeader) -> dict[str, Any]:
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    config = gemma_config(header, "attention.sliding_window", *caps)
    return {
        **config,
        "sliding_window": header.integer("attention.sliding_window", GEMMA2_WINDOW),
        "query_pre_attn_scalar": query_scalar(config, 46),
        **{key: header.number(key) if header.has(key) else None for key in caps},
    }


def _gemma2_states(spec: DecoderSpec) -> Mapping[str, Any]:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionMixer)
    caps = {
        "attn_logit_softcapping": mixer.softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    return {key: cap for key, cap in caps.items() if cap is not None}


GEMMA2_GGUF = GGUFArchitecture(
    "Gemma2ForCausalLM",
    SANDWICH_TENSORS,
    config=_gemma2_config,
    norm_offset=1.0,
    states=_gemma2_states,
)
