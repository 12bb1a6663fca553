"""GGUF description of an architecture: tensor names, metadata keys and conversions.

An architecture's own file declares it once, next to its config reader:

    GGUF = GGUFArchitecture("Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS})

and its `ModelSpec` names it (`gguf="package.module:GGUF"`, `gguf_names=("qwen3",)`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from vllmx_core.records import Record, field

from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import ROPE_TENSORS, rope_config

DECODER_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
"""Names of the common decoder, without ".weight" and ".bias"; {} is the layer."""
HEAD_NORM_TENSORS: Mapping[str, str] = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
EXPERT_TENSORS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.{}.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.{}.up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.{}.down_proj",
}
"""A file has all experts of a layer as one tensor; the second {} is the expert."""
_MIXTRAL = "model.layers.{}.block_sparse_moe"
MIXTRAL_TENSORS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": f"{_MIXTRAL}.gate",
    "blk.{}.ffn_gate_exps": f"{_MIXTRAL}.experts.{{}}.w1",
    "blk.{}.ffn_up_exps": f"{_MIXTRAL}.experts.{{}}.w3",
    "blk.{}.ffn_down_exps": f"{_MIXTRAL}.experts.{{}}.w2",
}
"""Mixtral's, whose files are those of a "llama"."""
SANDWICH_TENSORS: Mapping[str, str] = {
    **DECODER_TENSORS,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
"""The tensors of layers with norms around both blocks."""
INTERLEAVED: Mapping[str, Literal["heads", "kv_heads"]] = {
    "blk.{}.attn_q": "heads",
    "blk.{}.attn_k": "kv_heads",
}
"""The rows of these are stored for RoPE over neighbouring pairs, as llama.cpp rotates a "llama"."""


def decoder_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The keys of config.json that every decoder has; `honoured` as in `refuse_quirks`."""
    header.refuse_quirks(*honoured)
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    head_size = header.integer("attention.key_length", max(hidden // heads, 1))
    if header.integer("attention.value_length", head_size) != head_size:
        raise header.error("attention.value_length", f"must be the key length, {head_size}")
    return {
        "hidden_size": hidden,
        "intermediate_size": _inner_size(header),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": header.integer("context_length"),
        **_epsilon(header),
        "hidden_act": "silu",
        **rope_config(header, head_size),
    }


def _inner_size(header: GGUFHeader) -> int:
    """The inner size of a dense feed-forward; files of experts alone may say nothing of it."""
    experts = "expert_feed_forward_length"
    if not header.has("feed_forward_length") and header.has(experts):
        return header.integer(experts)
    return header.integer("feed_forward_length")


def _epsilon(header: GGUFHeader) -> dict[str, Any]:
    """The epsilon of layer norms, if the file has one, otherwise of RMS norms."""
    if header.has("attention.layer_norm_epsilon"):
        return {"layer_norm_eps": header.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": header.number("attention.layer_norm_rms_epsilon")}


def experts_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys of config.json for experts; their width is `feed_forward_length` by default."""
    config = {
        "num_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length", _inner_size(header)),
    }
    if header.has("expert_shared_feed_forward_length"):
        shared = header.integer("expert_shared_feed_forward_length", low=0)
        config["shared_expert_intermediate_size"] = shared
    return config


def sigmoid_experts_config(
    header: GGUFHeader, *honoured: str, renormalised: bool = False
) -> dict[str, Any]:
    """The keys of config.json for DeepSeek V3's experts over grouped-query attention; files count
    layers of multi-token prediction as layers. `honoured`: as in `refuse_quirks`; `renormalised`:
    of weights where a file does not say it."""
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    config = decoder_config(header, "expert_count", "nextn_predict_layers", *honoured)
    config |= experts_config(header)
    extra = header.integer("nextn_predict_layers", 0, low=0)
    return config | {
        "num_hidden_layers": config["num_hidden_layers"] - extra,
        "num_nextn_predict_layers": extra,
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": header.integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("expert_weights_norm", renormalised),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }


def mixtral_config(header: GGUFHeader) -> dict[str, Any]:
    """Returns the config of a "llama" with experts, without the keys that every decoder has."""
    config = experts_config(header)
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "intermediate_size": config["moe_intermediate_size"],
    }


class GGUFArchitecture(Record):
    """The GGUF form of one architecture."""

    architecture: str
    """The name in config.json's `architectures`; `config` may name another one."""
    tensors: Mapping[str, str] = field(default_factory=lambda: DECODER_TENSORS)
    """Name in the file -> name in the original checkpoint; see `DECODER_TENSORS`. A key with
    ".weight" or ".bias" at its end names one tensor, and the original's whole name is given."""
    interleaved: Mapping[str, Literal["heads", "kv_heads"]] = field(default_factory=dict)
    """Names in the file whose rows must be reordered within each head."""
    config: Callable[[GGUFHeader], dict[str, Any]] = decoder_config
    """Metadata -> config.json. Vocabulary, ties, dtype and `architectures` are added to it."""
    unused: tuple[str, ...] = ROPE_TENSORS
    """Whole names of tensors that are not weights: `config` reads them, or they are unused."""
    states: Callable[[Any], Mapping[str, Any]] = lambda spec: {}
    """states(spec) of a `DecoderSpec`: extra metadata for written files, which `config` reads in
    addition to the keys of every decoder."""
    kept: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """kept(config.json): metadata for written files about parts that vllmx does not compute."""
    norm_offset: float = 0.0
    """A constant that files add to norm weights: 1 for Gemma 1 to 3."""
    plain_norms: tuple[str, ...] = ()
    """Names in the file of norms without `norm_offset`."""
    decays: tuple[str, ...] = ()
    """Names in the file of vectors stored as -exp of the original's."""
    read_only: tuple[str, ...] = ()
    """Older names in the file of some of `tensors`: read, but never written."""
    tiled_heads: bool = False
    """True if value head h of a delta net reads key head h % Hk; otherwise h // (H / Hk)."""
    with_experts: str = ""
    """`general.architecture` of models with experts, if that differs."""

    def name_of(self, pattern: str, suffix: str) -> str:
        """The original's name of a tensor, with places for the layer and perhaps the expert; empty
        if the architecture does not have it."""
        if (whole := self.tensors.get(pattern + suffix)) is not None:
            return whole
        stem = self.tensors.get(pattern)
        return "" if stem is None else stem + suffix
