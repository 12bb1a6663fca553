"""LFM2 of Liquid AI, dense and with experts (Lfm2ForCausalLM, Lfm2MoeForCausalLM): short
convolutions between gates, and a few layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.short_conv import ConvMixer
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.configs.hybrid import hybrid_layers, layer_kinds
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, layer_numbers, num_experts
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config, experts_config
from vllmx_models.formats.gguf.hybrids import (
    KV_HEADS,
    alike,
    has_tensor,
    kv_heads_of,
    of_each_layer,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, ModelNames

KINDS = ("conv", "full_attention")
ATTENTION = AttentionNames(o="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
MLP = MLPNames("feed_forward", "w1", "w3", "w2")
NORMS = LayerNorms("operator_norm", None, "ffn_norm")
NAMES = ModelNames(norm="model.embedding_norm")
DEFAULTS: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "max_position_embeddings": 128000,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}
"""The defaults of transformers for absent keys."""


def lfm2(config: Mapping[str, Any]) -> Decoder:
    """A dense feed-forward in each layer; its size may be derived by rounding `block_ff_dim`."""
    read = _read(config, "Lfm2ForCausalLM")
    mlp = DenseMLP(_inner_size(read), names=MLP)
    return _decoder(read, [mlp] * num_layers(read))


def lfm2_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts with sigmoid scores in all layers except the first ones."""
    read = _read(config, "Lfm2MoeForCausalLM")
    layers = num_layers(read)
    dense = read.integer("num_dense_layers", 2, low=0, high=layers)
    mlp = DenseMLP(read.integer("intermediate_size"), names=MLP)
    feed_forwards: list[FeedForward] = [mlp] * dense
    return _decoder(read, feed_forwards + [_experts(read)] * (layers - dense))


def _read(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """Maps three keys of older files to their current names."""
    names = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    older = {new: config[old] for old, new in names.items() if config.get(old) is not None}
    read = ConfigReader({**DEFAULTS, **config, **older}, architecture)
    read.refuse_quirks("layer_types", *EXPERT_KEYS)
    return read


def _decoder(read: ConfigReader, feed_forwards: list[FeedForward]) -> Decoder:
    norm, head = Norm(read.number("norm_eps")), head_size(read)
    layers, positions = len(feed_forwards), read.integer("max_position_embeddings")
    full = layer_numbers(read, "full_attn_idxs") or range(layers)
    kinds = layer_kinds(read, KINDS, [KINDS[layer in full] for layer in range(layers)])
    theta = read.number("rope_theta")
    rope = layer_ropes(read, head, [False], default_positions=positions, default_theta=theta)[0]
    mixers: dict[str, Mixer] = {
        "conv": ConvMixer(
            read.integer("hidden_size"),
            read.integer("conv_L_cache", low=2, high=64),
            read.flag("conv_bias", False),
        ),
        "full_attention": attention_mixer(read, head, rope=rope, qk_norm=norm, names=ATTENTION),
    }
    specs = hybrid_layers(kinds, mixers, feed_forwards, NORMS)
    return Decoder(
        decoder_spec(
            read, specs, default_positions=positions, default_tied=True, norm=norm, names=NAMES
        )
    )


def _inner_size(read: ConfigReader) -> int:
    """Two thirds of `intermediate_size` times a factor, rounded up to a multiple."""
    size = read.integer("intermediate_size")
    if not read.flag("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), read.integer("block_multiple_of")
    size = int(read.number("block_ffn_dim_multiplier") * size)
    return multiple * -(-size // multiple)


def _experts(read: ConfigReader) -> MoE:
    count = num_experts(read)
    route = RouteSpec(
        chosen_experts(read, count),
        "sigmoid",
        renormalise=read.flag("norm_topk_prob", True),
        eps=1e-6,
        scale=read.number("routed_scaling_factor", 1.0),
    )
    bias = "expert_bias" if read.flag("use_expert_bias", True) else None
    return MoE(
        count,
        read.integer("moe_intermediate_size"),
        Router(route, choice_bias=bias),
        tensors=EachExpert("w1", "w3", "w2"),
        module="feed_forward",
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Layers without key/value heads are convolutions."""
    config = decoder_config(alike(header, KV_HEADS), "expert_count")
    kinds = [KINDS[heads > 0] for heads in of_each_layer(header, KV_HEADS)]
    found = {
        **config,
        "layer_types": kinds,
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": header.integer("shortconv.l_cache"),
        "conv_bias": has_tensor(header, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    return found | _gguf_experts(header) if header.has("expert_count") else found


def _gguf_experts(header: GGUFHeader) -> dict[str, Any]:
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    return {
        **experts_config(header),
        "num_dense_layers": header.integer("leading_dense_block_count", 0, low=0),
        "use_expert_bias": has_tensor(header, "exp_probs_b.bias"),
        "norm_topk_prob": header.flag("expert_weights_norm", True),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
    }


_LAYER = "model.layers.{}"
_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",  # its name by the tables of the gguf package
    "output": "lm_head",
    "blk.{}.attn_norm": f"{_LAYER}.operator_norm",
    "blk.{}.attn_q": f"{_LAYER}.self_attn.q_proj",
    "blk.{}.attn_k": f"{_LAYER}.self_attn.k_proj",
    "blk.{}.attn_v": f"{_LAYER}.self_attn.v_proj",
    "blk.{}.attn_output": f"{_LAYER}.self_attn.out_proj",
    "blk.{}.attn_q_norm": f"{_LAYER}.self_attn.q_layernorm",
    "blk.{}.attn_k_norm": f"{_LAYER}.self_attn.k_layernorm",
    "blk.{}.shortconv.conv": f"{_LAYER}.conv.conv",
    "blk.{}.shortconv.in_proj": f"{_LAYER}.conv.in_proj",
    "blk.{}.shortconv.out_proj": f"{_LAYER}.conv.out_proj",
    "blk.{}.ffn_norm": f"{_LAYER}.ffn_norm",
    "blk.{}.ffn_gate": f"{_LAYER}.feed_forward.w1",
    "blk.{}.ffn_up": f"{_LAYER}.feed_forward.w3",
    "blk.{}.ffn_down": f"{_LAYER}.feed_forward.w2",
}


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    mixer = next((one for one in spec.mixers if isinstance(one, ConvMixer)), None)
    kernel = {} if mixer is None else {"shortconv.l_cache": mixer.kernel}
    moes = [isinstance(layer.feed_forward, MoE) for layer in spec.layers]
    experts = {"leading_dense_block_count": moes.index(True)} if any(moes) else {}
    return {KV_HEADS: kv_heads_of(spec), **kernel, **experts}


GGUF = GGUFArchitecture(
    "Lfm2ForCausalLM", _TENSORS, config=_gguf_config, states=_states, read_only=("output_norm",)
)
MOE_GGUF = GGUFArchitecture(
    "Lfm2MoeForCausalLM",
    {
        **_TENSORS,
        "blk.{}.ffn_gate_inp": f"{_LAYER}.feed_forward.gate",
        "blk.{}.ffn_gate_exps": f"{_LAYER}.feed_forward.experts.{{}}.w1",
        "blk.{}.ffn_up_exps": f"{_LAYER}.feed_forward.experts.{{}}.w3",
        "blk.{}.ffn_down_exps": f"{_LAYER}.feed_forward.experts.{{}}.w2",
        "blk.{}.exp_probs_b.bias": f"{_LAYER}.feed_forward.expert_bias",
    },
    config=_gguf_config,
    states=_states,
    read_only=("output_norm",),
)
