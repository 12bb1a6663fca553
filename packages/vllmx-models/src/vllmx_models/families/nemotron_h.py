"""Nemotron-H and Nemotron 3 (NemotronHForCausalLM): layers of one block each, Mamba-2, attention
without positions, an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from vllmx_core.ops.experts import ExpertsSpec

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.moe import EachExpert, LatentExperts, MoE
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, decoder_spec, head_size
from vllmx_models.configs.hybrid import layer_kinds
from vllmx_models.configs.moe import EXPERT_KEYS, num_experts
from vllmx_models.families.deepseek import CHOICE_BIAS, sigmoid_router
from vllmx_models.formats.gguf.architecture import (
    INTERLEAVED,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hybrids import (
    INNER,
    KV_HEADS,
    NEXT_TOKENS,
    alike,
    has_tensor,
    mamba_states,
    mamba_tensors,
    of_each_layer,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec, ModelNames
from vllmx_models.trunks.heads import HeadNames

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
NAMES = ModelNames(
    "backbone.embeddings", "backbone.layers", "backbone.norm_f", also=("backbone.", "model.")
)
MIXES = LayerNorms("norm", None, None)
FEEDS = LayerNorms(None, None, "norm")
ATTENTION = AttentionNames("mixer")
MLP = MLPNames("mixer")
SHARED = MLPNames("mixer.shared_experts")
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "intermediate_size": 21504,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "n_group": 1,
    "topk_group": 1,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
}
"""The defaults of transformers for absent keys."""


def nemotron_h(config: Mapping[str, Any]) -> Decoder:
    """The layers of multi-token prediction are two of these, attention and experts."""
    head = config.get("attention_head_dim", DEFAULTS["head_dim"])  # its name in older files
    read = ConfigReader({**DEFAULTS, "head_dim": head, **config}, "NemotronHForCausalLM")
    read.refuse_quirks("layer_types", "mlp_bias", *EXPERT_KEYS)
    if read.config.get("mlp_hidden_act", "relu2") != "relu2":
        raise read.error("mlp_hidden_act", "is not known here: relu2")
    norm = Norm(read.number("layer_norm_epsilon"))
    blocks: dict[str, LayerSpec] = {}
    kinds = _kinds(read)
    for kind in dict.fromkeys(kinds):
        blocks[kind] = _layer(read, kind)
    layers = tuple(blocks[kind] for kind in kinds)
    positions = read.integer("max_position_embeddings")
    spec = decoder_spec(read, layers, default_positions=positions, norm=norm, names=NAMES)
    return Decoder(replace(spec, prediction=_prediction(read)))


def _prediction(read: ConfigReader) -> HeadNames | None:
    if not read.integer("num_nextn_predict_layers", 0, low=0):
        return None
    kinds = ["full_attention", "moe"]
    if read.has("mtp_hybrid_override_pattern") or read.has("mtp_layers_block_type"):
        kinds = _kinds(read, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    return HeadNames(
        "mtp.layers",
        "mtp",
        embedding_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        projection="layers.0.eh_proj",
        norm=f"layers.{len(kinds) - 1}.final_layernorm",
        blocks=tuple(_layer(read, kind) for kind in kinds),
    )


def _kinds(
    read: ConfigReader,
    letters: str = "hybrid_override_pattern",
    lists: tuple[str, ...] = ("layers_block_type", "layer_types"),
) -> list[str]:
    """The kind of each layer: a list, or a letter for each in older files."""
    key = next((one for one in lists if read.has(one)), None)
    if key is not None:
        given = read.config[key]
        known = (*PATTERN.values(), *OLDER)
        count = len(given) if isinstance(given, list) else 1
        return [OLDER.get(kind, kind) for kind in layer_kinds(read, known, [""] * count, key)]
    pattern = read.config.get(letters)
    if not isinstance(pattern, str) or not pattern or set(pattern) - PATTERN.keys():
        raise read.error(letters, f"must be a text of {' '.join(PATTERN)}")
    return [PATTERN[letter] for letter in pattern]


def _layer(read: ConfigReader, kind: str) -> LayerSpec:
    bias = read.flag("mlp_bias", False)
    if kind == "linear_attention":
        return LayerSpec(_mamba(read), None, MIXES)
    if kind == "full_attention":
        return LayerSpec(attention_mixer(read, head_size(read), names=ATTENTION), None, MIXES)
    if kind == "mlp":
        size = read.integer("intermediate_size")
        return LayerSpec(None, DenseMLP(size, "relu2", False, bias, names=MLP), FEEDS)
    return LayerSpec(None, _experts(read, bias), FEEDS)


def _mamba(read: ConfigReader) -> MambaMixer:
    heads = read.integer("mamba_num_heads", high=1 << 16)
    groups = read.integer("n_groups", high=heads)
    if heads % groups:
        raise read.error("n_groups", f"must divide mamba_num_heads = {heads}")
    if read.activation("mamba_hidden_act") != "silu":
        raise read.error("mamba_hidden_act", "is not known here for convolutions: silu")
    return MambaMixer(
        heads,
        read.integer("mamba_head_dim", high=4096),
        groups,
        read.integer("ssm_state_size", high=4096),
        read.integer("conv_kernel", low=2, high=64),
        read.number("layer_norm_epsilon"),
        conv_bias=read.flag("use_conv_bias", True),
        bias=read.flag("use_bias", False),
        dt_min=read.number("time_step_min"),
        module="mixer",
    )


def _experts(read: ConfigReader, bias: bool) -> MoE:
    """Experts without gates; where the config says so, between matrices to fewer features and
    back."""
    if bias:
        raise read.error("mlp_bias", "is not known here for experts: false")
    count = num_experts(read, ("n_routed_experts",))
    latent = None
    if read.has("moe_latent_size"):
        names = "fc1_latent_proj", "fc2_latent_proj"
        latent = LatentExperts(read.integer("moe_latent_size"), *names)
    shared = DenseMLP(
        read.integer("moe_shared_expert_intermediate_size"), "relu2", gated=False, names=SHARED
    )
    return MoE(
        count,
        read.integer("moe_intermediate_size"),
        sigmoid_router(read, count),
        ExpertsSpec("relu2", gated=False),
        EachExpert(None),
        shared=shared,
        latent=latent,
        module="mixer",
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """A layer has key/value heads, or a feed-forward, or is Mamba-2; behind the others lie layers
    of multi-token prediction."""
    config = decoder_config(alike(header, KV_HEADS, INNER), "expert_count", "nextn_predict_layers")
    moe, extra = header.has("expert_count"), header.integer("nextn_predict_layers", 0, low=0)
    feeds = "moe" if moe else "mlp"
    kinds = [
        "full_attention" if heads else feeds if inner else "linear_attention"
        for heads, inner in zip(
            of_each_layer(header, KV_HEADS), of_each_layer(header, INNER), strict=True
        )
    ]
    heads = header.integer("ssm.time_step_rank")
    return {
        **config,
        **(_gguf_experts(header) if moe else {}),
        "num_hidden_layers": len(kinds) - extra,
        "layers_block_type": kinds[: len(kinds) - extra],
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon"),
        "mamba_hidden_act": "silu",
        "mamba_num_heads": heads,
        "mamba_head_dim": header.integer("ssm.inner_size") // heads,
        "n_groups": header.integer("ssm.group_count"),
        "ssm_state_size": header.integer("ssm.state_size"),
        "conv_kernel": header.integer("ssm.conv_kernel"),
        "use_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "use_bias": has_tensor(header, "ssm_in.bias"),
        "mlp_bias": has_tensor(header, "ffn_up.bias"),
    }


def _gguf_experts(header: GGUFHeader) -> dict[str, Any]:
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    found = experts_config(alike(header, INNER))
    return {
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": found["shared_expert_intermediate_size"],
        "moe_latent_size": header.integer("moe_latent_size")
        if header.has("moe_latent_size")
        else None,
        "norm_topk_prob": header.flag("expert_weights_norm", True),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    """GGUF metadata. Both epsilon keys are the same value: llama.cpp reads either."""
    feeds = [layer.feed_forward for layer in spec.layers]
    inner = [one.intermediate_size if isinstance(one, DenseMLP | MoE) else 0 for one in feeds]
    moe = next((one for one in feeds if isinstance(one, MoE)), None)
    return {
        **mamba_states(spec),
        "attention.layer_norm_epsilon": float(spec.norm.eps),
        INNER: np.array(inner, np.int32),
        **({} if moe is None else _moe_states(moe)),
    }


def _moe_states(moe: MoE) -> dict[str, Any]:
    route, shared, latent = moe.router.route, moe.shared, moe.latent
    found = {
        "expert_shared_count": 1,
        "expert_weights_scale": float(route.scale),
        "expert_group_count": route.groups,
        "expert_group_used_count": route.groups_kept,
    }
    if shared is not None:
        found["expert_shared_feed_forward_length"] = shared.intermediate_size
    return found if latent is None else {**found, "moe_latent_size": latent.size}


_LAYER = "backbone.layers.{}"
_MIXER = f"{_LAYER}.mixer"
GGUF = GGUFArchitecture(
    "NemotronHForCausalLM",
    {
        **mamba_tensors(_MIXER),
        **NEXT_TOKENS,
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "blk.{}.attn_norm": f"{_LAYER}.norm",
        "blk.{}.post_attention_norm": f"{_LAYER}.nextn.norm",
        "blk.{}.attn_q": f"{_MIXER}.q_proj",
        "blk.{}.attn_k": f"{_MIXER}.k_proj",
        "blk.{}.attn_v": f"{_MIXER}.v_proj",
        "blk.{}.attn_output": f"{_MIXER}.o_proj",
        "blk.{}.ffn_up": f"{_MIXER}.up_proj",
        "blk.{}.ffn_down": f"{_MIXER}.down_proj",
        "blk.{}.ffn_gate_inp": f"{_MIXER}.gate",
        "blk.{}.exp_probs_b.bias": f"{_MIXER}.{CHOICE_BIAS}",
        "blk.{}.ffn_up_exps": f"{_MIXER}.experts.{{}}.up_proj",
        "blk.{}.ffn_down_exps": f"{_MIXER}.experts.{{}}.down_proj",
        "blk.{}.ffn_up_shexp": f"{_MIXER}.shared_experts.up_proj",
        "blk.{}.ffn_down_shexp": f"{_MIXER}.shared_experts.down_proj",
        "blk.{}.ffn_latent_down": f"{_MIXER}.fc1_latent_proj",
        "blk.{}.ffn_latent_up": f"{_MIXER}.fc2_latent_proj",
    },
    interleaved=INTERLEAVED,
    config=_gguf_config,
    states=_states,
    with_experts="nemotron_h_moe",
    decays=("blk.{}.ssm_a",),
)
"""Files with experts have another architecture name but the same tensor names."""
