"""OLMoE (OlmoeForCausalLM): small experts in every layer, one norm across all query heads and one
across all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
)
from vllmx_models.configs.moe import EXPERT_KEYS
from vllmx_models.families.qwen_moe import qwen_moe
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 4096
_CLAMP = "attention.clamp_kqv"


def olmoe(config: Mapping[str, Any]) -> Decoder:
    """Expert scores are a softmax over all experts, renormalised if `norm_topk_prob`."""
    read = ConfigReader({"rms_norm_eps": 1e-5, **config}, "OlmoeForCausalLM")
    read.refuse_quirks("attention_bias", "clip_qkv", *EXPERT_KEYS)
    bias = read.flag("attention_bias", False)
    mixer = attention_mixer(
        read,
        head_size(read),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=rms(read),
        norm_weights="across",
        clip=read.number("clip_qkv") if read.has("clip_qkv") else None,
    )
    sliding = [False] * num_layers(read)
    ropes = layer_ropes(read, mixer.head_size, sliding, default_positions=DEFAULT_POSITIONS)
    moe = qwen_moe(read, "intermediate_size")
    layers = layer_specs(read, mixer, moe, ropes, sliding, None)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Expert weights in files are not renormalised."""
    config = decoder_config(header, "expert_count", _CLAMP) | experts_config(header)
    clip = header.number(_CLAMP) if header.has(_CLAMP) else None
    return config | {"intermediate_size": config["moe_intermediate_size"], "clip_qkv": clip}


def _states(spec: DecoderSpec) -> dict[str, Any]:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionMixer)
    return {} if mixer.clip is None else {_CLAMP: mixer.clip}


GGUF = GGUFArchitecture(
    "OlmoeForCausalLM",
    {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **EXPERT_TENSORS},
    config=_gguf_config,
    states=_states,
)
