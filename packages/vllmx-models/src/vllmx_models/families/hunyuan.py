"""Hunyuan 1 (HunYuanDenseV1ForCausalLM) and Hunyuan-A13B (HunYuanMoEV1ForCausalLM): Llama's layers,
or Mixtral's with a shared expert, whose norms of query and key heads follow the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.moe import MoE, Router
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
)
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, experts_spec, num_experts
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

POSITIONS = 2048
NAMES = AttentionNames(q_norm="query_layernorm", k_norm="key_layernorm")


def hunyuan_v1_dense(config: Mapping[str, Any]) -> Decoder:
    """`use_qk_norm` is true in all published models."""
    read = _reader(config, "HunYuanDenseV1ForCausalLM")
    return _decoder(read, dense_mlp(read))


def hunyuan_v1_moe(config: Mapping[str, Any]) -> Decoder:
    """Keys that some files state for each layer have one value for all."""
    alike = ("moe_topk", "moe_intermediate_size", "num_shared_expert")
    given = {key: _one(config[key]) for key in alike if config.get(key) is not None}
    if "moe_topk" in given:
        given["num_experts_per_tok"] = given["moe_topk"]
    config = {"num_experts": 1, "num_experts_per_tok": 1, **config, **given}
    read = _reader(config, "HunYuanMoEV1ForCausalLM")
    inner = read.integer("intermediate_size")
    for key, value in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        if read.integer(key, value) != value:
            raise read.error(key, f"is not known here: {value}")
    count = num_experts(read)
    route = RouteSpec(chosen_experts(read, count), renormalise=True)
    shared = dense_mlp(read, names=MLPNames("mlp.shared_mlp"))
    return _decoder(
        read, MoE(count, inner, Router(route, "gate.wg"), experts_spec(read), shared=shared)
    )


def _one(value: Any) -> Any:
    """The value of a list that repeats it."""
    same = isinstance(value, list) and value and all(one == value[0] for one in value)
    return value[0] if same else value


def _reader(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """The config with the base of rotations that `alpha` stretches."""
    read = ConfigReader({"rms_norm_eps": 1e-5, **config}, architecture)
    read.refuse_quirks("attention_bias", "use_qk_norm", *EXPERT_KEYS)
    if not read.flag("use_qk_norm", True):
        raise read.error("use_qk_norm", "is not known here: true")
    key = "rope_scaling" if read.has("rope_scaling") else "rope_parameters"
    rope = read.part(key)
    if rope.config.get("type", rope.config.get("rope_type")) != "dynamic" or not rope.has("alpha"):
        return read
    size = head_size(read)
    theta = rope.number("rope_theta", read.number("rope_theta", 10_000.0))
    stretched = theta * rope.number("alpha") ** (size / (size - 2))
    return ConfigReader({**read.config, key: {"rope_theta": stretched}}, architecture)


def _decoder(read: ConfigReader, feed_forward: FeedForward) -> Decoder:
    bias, count = read.flag("attention_bias", False), num_layers(read)
    mixer = attention_mixer(
        read,
        head_size(read),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=rms(read),
        norm_last=True,
        names=NAMES,
    )
    whole = [False] * count
    ropes = layer_ropes(read, mixer.head_size, whole, default_positions=POSITIONS)
    layers = layer_specs(read, mixer, feed_forward, ropes, whole, None)
    return Decoder(decoder_spec(read, layers, default_positions=POSITIONS))


def _moe_config(header: GGUFHeader) -> dict[str, Any]:
    """Files have a shared expert as wide as the others."""
    config = decoder_config(header, "expert_count") | experts_config(header)
    return config | {"intermediate_size": config["moe_intermediate_size"]}


_LAYER = "model.layers.{}"
_NORMS = {
    f"blk.{{}}.attn_{name}_norm": f"{_LAYER}.self_attn.{module}_layernorm"
    for name, module in (("q", "query"), ("k", "key"))
}
_SHARED = {
    f"blk.{{}}.ffn_{name}_shexp": f"{_LAYER}.mlp.shared_mlp.{name}_proj"
    for name in ("gate", "up", "down")
}
GGUF = GGUFArchitecture("HunYuanDenseV1ForCausalLM", {**DECODER_TENSORS, **_NORMS})
MOE_GGUF = GGUFArchitecture(
    "HunYuanMoEV1ForCausalLM",
    {
        **DECODER_TENSORS,
        **_NORMS,
        **EXPERT_TENSORS,
        **_SHARED,
        "blk.{}.ffn_gate_inp": f"{_LAYER}.mlp.gate.wg",
    },
    config=_moe_config,
)
