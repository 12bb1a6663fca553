"""DeepSeek V2, V2-Lite, V3, V3.1, V3.2 and R1, and models in V3's layout: Kimi K2, Moonlight,
GLM-4.7-Flash, GLM-5, Mistral 4.

Unlike Llama, layers have latent attention and, except the first ones, routed plus shared experts
(V2: arXiv:2405.04434, V3: arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.moe import EitherExperts, MoE, Router
from vllmx_models.blocks.query_scale import read_query_scale
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp
from vllmx_models.configs.latent import latent_decoder, own_indexers
from vllmx_models.configs.moe import chosen_experts, experts_spec, num_experts, sparse_layers
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS, EXPERT_TENSORS, GGUFArchitecture
from vllmx_models.formats.gguf.hybrids import has_tensor
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import rope_config, with_query_scale
from vllmx_models.trunks.decoder import Decoder, DecoderSpec
from vllmx_models.trunks.heads import HeadNames

SHARED = MLPNames("mlp.shared_experts")
TENSORS = EitherExperts()
"""One tensor for each expert, as published, or (Mistral 4) stacks."""
CHOICE_BIAS = "gate.e_score_correction_bias"
HONOURED = ("attention_bias", "layer_types", "mlp_bias", "num_experts", "num_local_experts")
LAYER_TYPES = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
V2: Mapping[str, Any] = {
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
"""The defaults of transformers for absent keys."""
V3: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
}
INDEXED: Mapping[str, Any] = {"index_topk": 2048, "index_head_dim": 128}
V32 = {**V3, **INDEXED, "max_position_embeddings": 163840, "index_n_heads": 64}
GLM = {**V3, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
MISTRAL4 = {
    **V3,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 1 << 20,
    "n_group": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
GLM_DSA = {**GLM, **INDEXED, "index_n_heads": 32, "indexer_rope_interleave": True}
GLM_LITE = {**GLM, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}


def deepseek_v2(config: Mapping[str, Any]) -> Decoder:
    """Experts with softmax scores, from the groups with the best single expert."""
    return _decoder(ConfigReader({**V2, **config}, "DeepseekV2ForCausalLM"), _softmax_router)


def deepseek_v3(config: Mapping[str, Any]) -> Decoder:
    """Experts with sigmoid scores plus a selection bias, from the groups with the best pairs."""
    return _decoder(ConfigReader({**V3, **config}, "DeepseekV3ForCausalLM"), sigmoid_router)


def deepseek_v32(config: Mapping[str, Any]) -> Decoder:
    """V3 with sparse attention."""
    return _decoder(ConfigReader({**V32, **config}, "DeepseekV32ForCausalLM"), sigmoid_router)


def glm4_moe_lite(config: Mapping[str, Any]) -> Decoder:
    """GLM-4.7-Flash, with the layers of DeepSeek V3."""
    return _decoder(ConfigReader({**GLM_LITE, **config}, "Glm4MoeLiteForCausalLM"), sigmoid_router)


def glm_moe_dsa(config: Mapping[str, Any]) -> Decoder:
    """GLM-5 to 5.3, with sparse attention."""
    return _decoder(ConfigReader({**GLM_DSA, **config}, "GlmMoeDsaForCausalLM"), sigmoid_router)


def mistral4(config: Mapping[str, Any]) -> Decoder:
    """Mistral Small 4 and Large 3: experts with softmax scores that add up to one, and queries that
    grow with their position."""
    read, scale = read_query_scale(ConfigReader({**MISTRAL4, **config}, "Mistral4ForCausalLM"))
    # the share of a head that rotates, which `qk_rope_head_dim` says, too
    ropes = {
        key: {name: one for name, one in value.items() if name != "partial_rotary_factor"}
        for key, value in read.config.items()
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping)
    }
    read = ConfigReader({**read.config, **ropes}, read.architecture)
    return _decoder(read, _renormalised_router, query_scale=scale)


def _decoder(
    read: ConfigReader, router: Callable[[ConfigReader, int], Router], **mixer: Any
) -> Decoder:
    read.refuse_quirks(*HONOURED)
    kinds = read.config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in LAYER_TYPES for kind in kinds):
        raise read.error("layer_types", f"must be a list of {' or '.join(LAYER_TYPES)}")
    sparse = sparse_layers(read)
    feed_forwards: dict[bool, FeedForward] = {}
    if not all(sparse):
        feed_forwards[False] = dense_mlp(read, bias=read.flag("mlp_bias", False))
    if any(sparse):
        feed_forwards[True] = shared_experts(read, router)
    decoder = latent_decoder(read, tuple(feed_forwards[one] for one in sparse), **mixer)
    return Decoder(replace(decoder, prediction=prediction(len(sparse))))


def prediction(num_layers: int) -> HeadNames:
    """The layer of multi-token prediction, which follows the others in V3's checkpoints."""
    layer = f"model.layers.{num_layers}"
    return HeadNames(
        "model.layers",
        layer,
        num_layers,
        embedding=f"{layer}.embed_tokens",
        head=f"{layer}.shared_head.head",
    )


def shared_experts(read: ConfigReader, router: Callable[[ConfigReader, int], Router]) -> MoE:
    """Routed experts and shared ones; the latter are fused into a single MLP."""
    count, inner = num_experts(read, ("n_routed_experts",)), read.integer("moe_intermediate_size")
    every = read.integer("n_shared_experts", 0, low=0, high=256)
    shared = DenseMLP(every * inner, read.activation(), names=SHARED) if every else None
    return MoE(count, inner, router(read, count), experts_spec(read), TENSORS, shared=shared)


def _softmax_router(read: ConfigReader, count: int) -> Router:
    method = _only(read, "topk_method", "greedy", "group_limited_greedy")
    _only(read, "scoring_func", "softmax")
    if read.flag("norm_topk_prob", False):
        raise read.error("norm_topk_prob", "is not known here with softmax: false")
    groups, kept = _groups(read, count) if method == "group_limited_greedy" else (1, 1)
    scale = read.number("routed_scaling_factor")
    return Router(
        RouteSpec(_chosen(read, count, groups, kept), "softmax", groups, kept, scale=scale)
    )


def _renormalised_router(read: ConfigReader, count: int) -> Router:
    return Router(_best_groups(read, count, "softmax"))


def _best_groups(
    read: ConfigReader, count: int, scores: Literal["softmax", "sigmoid"]
) -> RouteSpec:
    """The route over the groups with the best two experts; weights add up to the factor."""
    groups, kept = _groups(read, count)
    return RouteSpec(
        _chosen(read, count, groups, kept),
        scores,
        groups,
        kept,
        "best_two",
        renormalise=read.flag("norm_topk_prob", True),
        eps=1e-20,
        scale=read.number("routed_scaling_factor"),
    )


def sigmoid_router(read: ConfigReader, count: int) -> Router:
    """V3's router: a bias affects only the selection, and weights sum to the scaling factor."""
    _only(read, "topk_method", "noaux_tc")
    _only(read, "scoring_func", "sigmoid")
    return Router(_best_groups(read, count, "sigmoid"), choice_bias=CHOICE_BIAS)


def _only(read: ConfigReader, key: str, *known: str) -> str:
    """The value of a key, by default the first known one."""
    value = read.config.get(key)
    if value is not None and value not in known:
        raise read.error(key, f"is not known here; known: {', '.join(known)}")
    return known[0] if value is None else str(value)


def _groups(read: ConfigReader, count: int) -> tuple[int, int]:
    """The number of expert groups, and how many of them a token may choose from."""
    groups = read.integer("n_group")
    if count % groups or (groups > 1 and count // groups < 2):
        raise read.error("n_group", f"must part {count} experts into equal groups of two or more")
    kept = read.integer("topk_group")
    if kept > groups:
        raise read.error("topk_group", f"must be at most n_group = {groups}")
    return groups, kept


def _chosen(read: ConfigReader, count: int, groups: int, kept: int) -> int:
    """The number of experts that process a token, out of the `kept` groups."""
    return chosen_experts(read, kept * (count // groups))


TOP_K = "attention.indexer.top_k"
INDEXER: Mapping[str, str] = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": TOP_K,
}
"""Keys of the indexer of sparse attention, in config.json and in GGUF files."""
OWN_INDEXERS = "attention.indexer.types"


def latent_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The keys of config.json for a decoder with latent attention; `honoured` as in
    `refuse_quirks`. Newer files have the matrices of each head, and lengths ending in "mla" for
    what heads were before they are absorbed."""
    header.refuse_quirks(
        "attention.key_length_mla",
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "expert_count",
        *honoured,
    )
    rotary = header.integer("rope.dimension_count")
    absorbed = header.has("attention.key_length_mla")
    suffix, heads = "_mla" if absorbed else "", header.integer("attention.head_count")
    return {
        "hidden_size": header.integer("embedding_length"),
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": header.integer("context_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": header.integer("attention.q_lora_rank", 0, low=0) or None,
        "kv_lora_rank": header.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": header.integer(f"attention.key_length{suffix}") - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": header.integer(f"attention.value_length{suffix}"),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0, low=0),
        "vllmx_cut_heads": has_tensor(header, "attn_k_b.weight"),
        **with_query_scale(header, rope_config(header, rotary)),
    }


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    config = latent_config(header, TOP_K, "attention.temperature_scale", "nextn_predict_layers")
    extra = header.integer("nextn_predict_layers", 0, low=0)
    layers = config["num_hidden_layers"] - extra
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": extra}
    if header.has(TOP_K):
        config |= {ours: header.integer(key) for ours, key in INDEXER.items() if header.has(key)}
        if header.has(OWN_INDEXERS):
            own = header.flags(OWN_INDEXERS, layers)
            config["indexer_types"] = ["full" if one else "shared" for one in own]
    elif header.architecture not in ("deepseek2", "mistral4"):
        raise header.error(TOP_K, "is needed: the architecture has sparse attention")
    return config | _gguf_experts(header, layers)


def _gguf_experts(header: GGUFHeader, layers: int) -> dict[str, Any]:
    """A "deepseek2" with experts by sigmoid is a V3, GLM-4.7-Flash among them, of which the first
    files do not say so."""
    vocabulary = header.tensors["token_embd.weight"].shape[0]
    flash = layers in (47, 48) and vocabulary == 154880
    sigmoid = flash or header.architecture not in ("deepseek2", "mistral4")
    gating = header.integer("expert_gating_func", 2 if sigmoid else 1)
    if gating not in (1, 2):
        raise header.error(
            "expert_gating_func", "is not known here; known: 1 (softmax), 2 (sigmoid)"
        )
    groups = header.integer("expert_group_count", 1)
    grouped = "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "architectures": [_architecture(header, gating)],
        "n_routed_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "n_shared_experts": header.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": header.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if gating == 2 else grouped,
    }


def _architecture(header: GGUFHeader, gating: int) -> str:
    if header.architecture == "mistral4":
        return "Mistral4ForCausalLM"
    if header.architecture == "glm-dsa":
        return "GlmMoeDsaForCausalLM"
    if header.has(TOP_K):
        return "DeepseekV32ForCausalLM"
    return "DeepseekV3ForCausalLM" if gating == 2 else "DeepseekV2ForCausalLM"


def expert_states(spec: DecoderSpec) -> dict[str, Any]:
    """GGUF metadata of routed and shared experts, and of the dense layers before them."""
    numbers = [n for n, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, MoE)]
    if not numbers:
        return {}
    moe = spec.layers[numbers[0]].feed_forward
    assert isinstance(moe, MoE)
    route, shared = moe.router.route, moe.shared
    return {
        "leading_dense_block_count": numbers[0],
        "expert_shared_count": 0
        if shared is None
        else shared.intermediate_size // moe.intermediate_size,
        "expert_weights_scale": float(route.scale),
        "expert_weights_norm": route.renormalise,
        "expert_gating_func": 2 if route.score == "sigmoid" else 1,
        "expert_group_count": route.groups,
        "expert_group_used_count": route.groups_kept,
    }


def indexer(config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF metadata of the indexer, and of the layers with their own."""
    name = (config.get("architectures") or [""])[0]
    defaults = {"DeepseekV32ForCausalLM": V32, "GlmMoeDsaForCausalLM": GLM_DSA}.get(name, {})
    config = {**defaults, **config}
    found: dict[str, Any] = {key: config[ours] for ours, key in INDEXER.items() if ours in config}
    if found:
        own = own_indexers(ConfigReader(config, name), config["num_hidden_layers"])
        if not all(own):
            found[OWN_INDEXERS] = np.array(own)
    return found


_LAYER = "model.layers.{}"
DEEPSEEK_EXPERTS: Mapping[str, str] = {
    **EXPERT_TENSORS,
    "blk.{}.exp_probs_b.bias": f"{_LAYER}.mlp.{CHOICE_BIAS}",
    "blk.{}.ffn_gate_shexp": f"{_LAYER}.mlp.shared_experts.gate_proj",
    "blk.{}.ffn_up_shexp": f"{_LAYER}.mlp.shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": f"{_LAYER}.mlp.shared_experts.down_proj",
    "blk.{}.nextn.eh_proj": f"{_LAYER}.eh_proj",
    "blk.{}.nextn.embed_tokens": f"{_LAYER}.embed_tokens",
    "blk.{}.nextn.enorm": f"{_LAYER}.enorm",
    "blk.{}.nextn.hnorm": f"{_LAYER}.hnorm",
    "blk.{}.nextn.shared_head_head": f"{_LAYER}.shared_head.head",
    "blk.{}.nextn.shared_head_norm": f"{_LAYER}.shared_head.norm",
}
"""Experts, shared ones, and layers of multi-token prediction."""
LATENT_TENSORS: Mapping[str, str] = {
    **DECODER_TENSORS,
    "blk.{}.attn_q_a": f"{_LAYER}.self_attn.q_a_proj",
    "blk.{}.attn_q_a_norm": f"{_LAYER}.self_attn.q_a_layernorm",
    "blk.{}.attn_q_b": f"{_LAYER}.self_attn.q_b_proj",
    "blk.{}.attn_kv_a_mqa": f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
    "blk.{}.attn_kv_a_norm": f"{_LAYER}.self_attn.kv_a_layernorm",
    "blk.{}.attn_kv_b": f"{_LAYER}.self_attn.kv_b_proj",
    "blk.{}.attn_k_b": f"{_LAYER}.self_attn.heads.{{}}.k_b_proj",
    "blk.{}.attn_v_b": f"{_LAYER}.self_attn.heads.{{}}.v_b_proj",
}
"""The tensors of a decoder with latent attention."""
GGUF = GGUFArchitecture(
    "DeepseekV2ForCausalLM",
    {
        **LATENT_TENSORS,
        **DEEPSEEK_EXPERTS,
        "blk.{}.indexer.k_norm": f"{_LAYER}.self_attn.indexer.k_norm",
        "blk.{}.indexer.proj": f"{_LAYER}.self_attn.indexer.weights_proj",
        "blk.{}.indexer.attn_k": f"{_LAYER}.self_attn.indexer.wk",
        "blk.{}.indexer.attn_q_b": f"{_LAYER}.self_attn.indexer.wq_b",
    },
    config=_gguf_config,
    states=expert_states,
    kept=indexer,
)
