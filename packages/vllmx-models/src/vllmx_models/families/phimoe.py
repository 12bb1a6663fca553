"""Phi-3.5-MoE (PhimoeForCausalLM, arXiv:2404.14219): attention with biases, layer norms, and
experts that are chosen by SparseMixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.norms import Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import num_layers
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, experts_spec, num_experts
from vllmx_models.families.llama import llama_decoder
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    MIXTRAL_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder


def phimoe(config: Mapping[str, Any]) -> Decoder:
    """A window, if set, applies to every layer."""
    read = ConfigReader(_with_attention_factor(config), "PhimoeForCausalLM")
    read.refuse_quirks("attention_bias", "sliding_window", *EXPERT_KEYS)
    window = read.integer("sliding_window", high=1 << 31) if read.has("sliding_window") else None
    count, bias = num_experts(read), read.flag("attention_bias", False)
    jitter = read.number("router_jitter_noise", 0.01)
    decoder = llama_decoder(
        read,
        kv_heads=8,
        positions=4096 * 32,
        biases=(bias, bias, False),
        sliding=[window is not None] * num_layers(read),
        window=window,
        norm=Norm(read.number("rms_norm_eps", 1e-5), "layer", bias=True),
        mlp=MoE(
            count,
            read.integer("intermediate_size"),
            Router(RouteSpec(chosen_experts(read, count), "sparsemixer", jitter=jitter)),
            experts_spec(read),
            EachExpert("w1", "w3", "w2"),
            module="block_sparse_moe",
        ),
    )
    return Decoder(replace(decoder.spec, head_bias=read.flag("lm_head_bias", False)))


def _with_attention_factor(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config with `short_mscale` and `long_mscale` of its RoPE under the name that
    other models have. Both must be equal: one table serves every length."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key)
    if not isinstance(given, Mapping) or "long_mscale" not in given:
        return config
    rest = {name: value for name, value in given.items() if not name.endswith("_mscale")}
    if given.get("short_mscale") != given["long_mscale"]:
        read = ConfigReader(config, "PhimoeForCausalLM")
        raise read.error(key, "must have one value for short_mscale and long_mscale")
    return {**config, key: {**rest, "attention_factor": given["long_mscale"]}}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """A window of 0 means full attention; files do not tell the jitter of the router."""
    config = decoder_config(header, "attention.sliding_window", "expert_count")
    experts = experts_config(header)
    return config | {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
        "sliding_window": header.integer("attention.sliding_window", 0, low=0) or None,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "lm_head_bias": "output.bias" in header.tensors,
        "rms_norm_eps": header.number(_EPSILON),
    }


_EPSILON = "attention.layer_norm_rms_epsilon"
"""The key that llama.cpp reads, though the norms are layer norms."""
_DENSE = tuple(f"blk.{{}}.ffn_{name}" for name in ("gate", "up", "down"))
GGUF = GGUFArchitecture(
    "PhimoeForCausalLM",
    {**{key: one for key, one in DECODER_TENSORS.items() if key not in _DENSE}, **MIXTRAL_TENSORS},
    config=_gguf_config,
    states=lambda spec: {_EPSILON: spec.norm.eps},
)
