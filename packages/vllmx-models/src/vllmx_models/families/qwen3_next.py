"""Qwen3-Next such as 80B-A3B (Qwen3NextForCausalLM).

Three of four layers are gated delta nets (arXiv:2412.06464), the others attention with a gated
output; each layer has routed experts and a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import UnsupportedModelError

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.recurrent import DeltaMixer, DeltaNames
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    num_layers,
    rms,
)
from vllmx_models.configs.hybrid import hybrid_layers, layer_kinds
from vllmx_models.configs.moe import EXPERT_KEYS, layer_numbers
from vllmx_models.families.qwen_moe import SHARED, qwen_moe
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hybrids import NEXT_TOKENS
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec
from vllmx_models.trunks.heads import HeadNames

KINDS = ("linear_attention", "full_attention")
HONOURED = ("attention_bias", "layer_types", "partial_rotary_factor", *EXPERT_KEYS)
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""The defaults of transformers for absent keys."""
INTERLEAVED = DeltaNames(qkvz="in_proj_qkvz", ba="in_proj_ba")


def qwen3_next(config: Mapping[str, Any]) -> Decoder:
    """The layer of multi-token prediction at the end of checkpoints drafts."""
    read = ConfigReader({**DEFAULTS, **config}, "Qwen3NextForCausalLM")
    read.refuse_quirks(*HONOURED)
    count, step = num_layers(read), read.integer("decoder_sparse_step", 1)
    only = layer_numbers(read, "mlp_only_layers")
    dense = [number in only or (number + 1) % step != 0 for number in range(count)]
    feed_forwards: dict[bool, FeedForward] = {}
    if any(dense):
        feed_forwards[True] = dense_mlp(read)
    if not all(dense):
        feed_forwards[False] = gated_moe(read)
    mlps = [feed_forwards[one] for one in dense]
    return qwen_hybrid(read, mlps, INTERLEAVED, prediction=prediction(count))


def prediction(num_layers: int) -> HeadNames:
    """The module of multi-token prediction; in GGUF files it is one more layer."""
    layer = f"model.layers.{num_layers}."
    return HeadNames(
        "mtp.layers",
        "mtp",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        norm="norm",
        embedding=f"{layer}nextn.embed_tokens",
        head=f"{layer}nextn.shared_head_head",
        also=(
            ("mtp.", "model.mtp."),
            ("mtp.layers.0.", layer),
            ("mtp.pre_fc_norm_embedding.", f"{layer}nextn.enorm."),
            ("mtp.pre_fc_norm_hidden.", f"{layer}nextn.hnorm."),
            ("mtp.fc.", f"{layer}nextn.eh_proj."),
            ("mtp.norm.", f"{layer}nextn.shared_head_norm."),
        ),
    )


def gated_moe(read: ConfigReader, **options: Any) -> MoE:
    """Routed experts and a shared one, weighted by a sigmoid gate."""
    inner = read.integer("shared_expert_intermediate_size")
    shared = DenseMLP(inner, read.activation(), names=SHARED)
    return qwen_moe(read, shared=shared, shared_gate="shared_expert_gate", **options)


def qwen_hybrid(
    read: ConfigReader, feed_forwards: list[FeedForward], delta: DeltaNames, **options: Any
) -> Decoder:
    """Delta nets and gated attention, with norm weights stored minus one; `options` are
    `DecoderSpec`'s."""
    every = read.integer("full_attention_interval")
    by_default = [KINDS[(layer + 1) % every == 0] for layer in range(len(feed_forwards))]
    norm, bias, head = rms(read, offset=1.0), read.flag("attention_bias", False), head_size(read)
    positions = read.integer("max_position_embeddings")
    attention = attention_mixer(
        read,
        head,
        rope=layer_ropes(read, head, [False], default_positions=positions)[0],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        gated=True,
    )
    mixers: dict[str, Mixer] = dict(zip(KINDS, (delta_mixer(read, delta), attention), strict=True))
    layers = hybrid_layers(layer_kinds(read, KINDS, by_default), mixers, feed_forwards)
    return Decoder(decoder_spec(read, layers, default_positions=positions, norm=norm, **options))


def delta_mixer(read: ConfigReader, names: DeltaNames) -> DeltaMixer:
    """The gated delta net mixer."""
    heads = read.integer("linear_num_value_heads", high=1 << 16)
    key_heads = read.integer("linear_num_key_heads", high=1 << 16)
    if heads % key_heads:
        raise read.error("linear_num_key_heads", f"must divide linear_num_value_heads = {heads}")
    if read.activation() != "silu":
        raise read.error("hidden_act", "is not known here for convolutions: silu")
    return DeltaMixer(
        heads,
        key_heads,
        read.integer("linear_key_head_dim", high=4096),
        read.integer("linear_value_head_dim", high=4096),
        read.integer("linear_conv_kernel_dim", low=2, high=64),
        read.number("rms_norm_eps", 1e-6),
        tiled=read.flag("vllmx_tiled_heads", False),
        names=names,
    )


def delta_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The config.json of a GGUF header; its layer count includes multi-token prediction."""
    config = decoder_config(header, "expert_count", "nextn_predict_layers", *honoured)
    heads, size = header.integer("ssm.time_step_rank"), config["head_dim"]
    experts = experts_config(header) if header.has("expert_count") else {}
    extra = header.integer("nextn_predict_layers", 0, low=0)
    return {
        **config,
        **experts,
        "num_hidden_layers": header.integer("block_count") - extra,
        "partial_rotary_factor": header.integer("rope.dimension_count", size) / size,
        "full_attention_interval": header.integer("full_attention_interval", 4),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": header.integer("ssm.group_count"),
        "linear_key_head_dim": header.integer("ssm.state_size"),
        "linear_value_head_dim": header.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
    }


LINEAR = "model.layers.{}.linear_attn"
_SHARED = "model.layers.{}.mlp.shared_expert"
DELTA_TENSORS: Mapping[str, str] = {
    **{name: ours for name, ours in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"},
    **HEAD_NORM_TENSORS,
    **NEXT_TOKENS,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv": f"{LINEAR}.in_proj_qkv",
    "blk.{}.attn_gate": f"{LINEAR}.in_proj_z",
    "blk.{}.ssm_conv1d": f"{LINEAR}.conv1d",
    "blk.{}.ssm_a": f"{LINEAR}.A_log",
    "blk.{}.ssm_dt.bias": f"{LINEAR}.dt_bias",
    "blk.{}.ssm_norm": f"{LINEAR}.norm",
    "blk.{}.ssm_out": f"{LINEAR}.out_proj",
}
SHARED_EXPERT_TENSORS: Mapping[str, str] = {
    **EXPERT_TENSORS,
    "blk.{}.ffn_gate_inp_shexp": f"{_SHARED}_gate",
    "blk.{}.ffn_gate_shexp": f"{_SHARED}.gate_proj",
    "blk.{}.ffn_up_shexp": f"{_SHARED}.up_proj",
    "blk.{}.ffn_down_shexp": f"{_SHARED}.down_proj",
}


def delta_states(spec: DecoderSpec) -> dict[str, Any]:
    """GGUF metadata of gated delta nets. Raises UnsupportedModelError if no layer is one."""
    kinds = [isinstance(mixer, DeltaMixer) for mixer in spec.mixers]
    mixer = next((one for one in spec.mixers if isinstance(one, DeltaMixer)), None)
    if mixer is None:
        raise UnsupportedModelError(
            "a model of this architecture without a layer of delta nets has no form in GGUF files"
        )
    return {
        "full_attention_interval": kinds.index(False) + 1,
        "ssm.time_step_rank": mixer.num_heads,
        "ssm.group_count": mixer.num_key_heads,
        "ssm.state_size": mixer.key_size,
        "ssm.inner_size": mixer.num_heads * mixer.value_size,
        "ssm.conv_kernel": mixer.kernel,
    }


CONVERTED: Mapping[str, Any] = {
    "states": delta_states,
    "norm_offset": 1.0,
    "plain_norms": ("blk.{}.ssm_norm",),
    "decays": ("blk.{}.ssm_a",),
}
"""Tensors that GGUF files store differently from the checkpoints."""
GGUF = GGUFArchitecture(
    "Qwen3NextForCausalLM",
    {
        **DELTA_TENSORS,
        **SHARED_EXPERT_TENSORS,
        "blk.{}.ssm_in": f"{LINEAR}.in_proj_qkvz",  # of older files, in place of two
        "blk.{}.ssm_ba": f"{LINEAR}.in_proj_ba",
    },
    config=delta_config,
    read_only=("blk.{}.ssm_in",),
    **CONVERTED,
)
