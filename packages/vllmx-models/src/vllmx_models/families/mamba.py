"""Mamba 1 (MambaForCausalLM, arXiv:2312.00752), with norms of step sizes, B and C
(FalconMambaForCausalLM, arXiv:2410.05355), with attention and experts in some layers
(JambaForCausalLM, arXiv:2403.19887); and Mamba 2 (Mamba2ForCausalLM, arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.mamba1 import Mamba1Mixer
from vllmx_models.blocks.moe import MoE, Router
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    num_layers,
)
from vllmx_models.configs.hybrid import hybrid_layers, layer_kinds, mamba_mixer
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    chosen_experts,
    experts_spec,
    num_experts,
    sparse_layers,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hybrids import (
    KV_HEADS,
    alike,
    has_tensor,
    mamba_tensors,
    of_each_layer,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, LayerSpec, ModelNames

POSITIONS = 1 << 15
"""The context, which has no greatest length."""
MAMBA_KEYS = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "intermediate_size": "mamba_width",
    "time_step_rank": "mamba_dt_rank",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
}
"""Mamba's names of keys, and Jamba's."""
NAMES = ModelNames("backbone.embeddings", "backbone.layers", "backbone.norm_f")
JAMBA: Mapping[str, Any] = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
"""The defaults of transformers for absent keys."""
KINDS = ("attention", "mamba")
NORMS = LayerNorms(before_mlp="pre_ff_layernorm")


def mamba(config: Mapping[str, Any]) -> Decoder:
    """A layer is a norm and a mixer."""
    read = _reader(config, "MambaForCausalLM")
    return _decoder(read, _mixer(read))


def falcon_mamba(config: Mapping[str, Any]) -> Decoder:
    """The norms of step sizes, B and C have no weights."""
    read = _reader(config, "FalconMambaForCausalLM")
    eps = read.number("mixer_rms_eps", 1e-6)
    return _decoder(read, _mixer(read, norm_eps=eps, norm_weights=False))


def mamba2(config: Mapping[str, Any]) -> Decoder:
    """The mixer's norm is over each group of heads."""
    defaults = {"expand": 2, "conv_kernel": 4, "tie_word_embeddings": False}
    read = _reader({**defaults, **config}, "Mamba2ForCausalLM")
    eps = read.number("layer_norm_epsilon", 1e-5)
    return _decoder(read, mamba_mixer(read, norm_eps=eps, module="mixer"))


def jamba(config: Mapping[str, Any]) -> Decoder:
    """Attention has no position embedding."""
    read = ConfigReader({**JAMBA, **config}, "JambaForCausalLM")
    read.refuse_quirks(*EXPERT_KEYS)
    attends, sparse = (_periodic(read, key) for key in ("attn_layer", "expert_layer"))
    kinds = layer_kinds(read, KINDS, [KINDS[not one] for one in attends], "layers_block_type")
    types = ["sparse" if one and num_experts(read) > 1 else "dense" for one in sparse]
    mixers: dict[str, Mixer] = {
        "attention": attention_mixer(read, head_size(read)),
        "mamba": _mixer(read, norm_eps=read.number("rms_norm_eps", 1e-6), module="mamba"),
    }
    dense = dense_mlp(read, names=MLPNames("feed_forward"))
    experts: FeedForward = dense
    if "sparse" in types:
        count = num_experts(read)
        router = Router(RouteSpec(chosen_experts(read, count)), "router")
        inner = read.integer("intermediate_size")
        experts = MoE(count, inner, router, experts_spec(read), module="feed_forward")
    read = ConfigReader({"mlp_layer_types": types, **read.config}, read.architecture)
    feeds = [experts if one else dense for one in sparse_layers(read)]
    layers = hybrid_layers(kinds, mixers, feeds, NORMS)
    names = ModelNames(norm="model.final_layernorm")
    return Decoder(decoder_spec(read, layers, default_positions=262144, names=names))


def _periodic(read: ConfigReader, key: str) -> list[bool]:
    """True for each layer at the offset of a period."""
    period = read.integer(f"{key}_period")
    offset = read.integer(f"{key}_offset", low=0, high=period - 1)
    return [layer % period == offset for layer in range(num_layers(read))]


def _reader(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """The config under Jamba's names of keys."""
    named = {ours: config.get(theirs) for theirs, ours in MAMBA_KEYS.items()}
    read = ConfigReader({**config, **named}, architecture)
    read.refuse_quirks()
    return read


def _decoder(read: ConfigReader, mixer: Mixer) -> Decoder:
    layer = LayerSpec(mixer, None, LayerNorms("norm", None, None))
    return Decoder(
        decoder_spec(
            read,
            (layer,) * num_layers(read),
            default_positions=POSITIONS,
            default_tied=True,
            norm=Norm(read.number("layer_norm_epsilon", 1e-5)),
            names=NAMES,
        )
    )


def _mixer(read: ConfigReader, **options: Any) -> Mamba1Mixer:
    """The mixer by Jamba's keys; `options` are `Mamba1Mixer`'s."""
    if read.activation() != "silu":
        raise read.error("hidden_act", "is not known here for convolutions: silu")
    hidden = read.integer("hidden_size")
    width = read.integer("mamba_width", read.integer("mamba_expand", 2) * hidden)
    rank = -(-hidden // 16)
    if read.config.get("mamba_dt_rank", "auto") not in ("auto", None):
        rank = read.integer("mamba_dt_rank")
    return Mamba1Mixer(
        width,
        read.integer("mamba_d_state", 16, high=2048),
        rank,
        read.integer("mamba_d_conv", 4, low=2, high=64),
        conv_bias=read.flag("mamba_conv_bias", True),
        bias=read.flag("mamba_proj_bias", False),
        **options,
    )


def _sizes(header: GGUFHeader) -> dict[str, Any]:
    return {
        "mamba_d_state": header.integer("ssm.state_size"),
        "mamba_d_conv": header.integer("ssm.conv_kernel"),
        "mamba_dt_rank": header.integer("ssm.time_step_rank"),
    }


def _jamba_config(header: GGUFHeader) -> dict[str, Any]:
    """Layers without key/value heads are Mamba; those with a router have experts."""
    config = decoder_config(alike(header, KV_HEADS), "expert_count")
    layers, inner = range(config["num_hidden_layers"]), header.integer("ssm.inner_size")
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in layers]
    return {
        **config,
        **_sizes(header),
        **(experts_config(header) if any(sparse) else {"num_experts": 1}),
        "mamba_width": inner,
        "layers_block_type": [KINDS[kv == 0] for kv in of_each_layer(header, KV_HEADS)],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
    }


def _mamba_config(header: GGUFHeader) -> dict[str, Any]:
    eps = header.number("attention.layer_norm_rms_epsilon")
    normed = header.flag("ssm.dt_b_c_rms", False)
    sizes = {theirs: _sizes(header).get(ours) for theirs, ours in MAMBA_KEYS.items()}
    return sizes | {
        "architectures": [f"{'Falcon' if normed else ''}MambaForCausalLM"],
        "hidden_size": header.integer("embedding_length"),
        "num_hidden_layers": header.integer("block_count"),
        "intermediate_size": header.integer("ssm.inner_size"),
        "max_position_embeddings": POSITIONS,
        "layer_norm_epsilon": eps,
        "mixer_rms_eps": eps,
        "use_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "use_bias": has_tensor(header, "ssm_in.bias"),
    }


def _mamba2_config(header: GGUFHeader) -> dict[str, Any]:
    heads, inner = header.integer("ssm.time_step_rank"), header.integer("ssm.inner_size")
    hidden = header.integer("embedding_length")
    return _mamba_config(header) | {
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // hidden,
        "n_groups": header.integer("ssm.group_count"),
    }


def _mixer_tensors(module: str) -> dict[str, str]:
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_x": "x_proj",
        "ssm_dt": "dt_proj",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_out": "out_proj",
        "ssm_dt_norm": "dt_layernorm",
        "ssm_b_norm": "b_layernorm",
        "ssm_c_norm": "c_layernorm",
    }
    return {f"blk.{{}}.{theirs}": f"{module}.{ours}" for theirs, ours in names.items()}


_OUTSIDE = {
    "token_embd": NAMES.embedding,
    "output_norm": NAMES.norm,
    "output": NAMES.head,
    "blk.{}.attn_norm": f"{NAMES.layers}.{{}}.norm",
}
_MIXER = f"{NAMES.layers}.{{}}.mixer"
_DECAYS = ("blk.{}.ssm_a",)
GGUF = GGUFArchitecture(
    "MambaForCausalLM",
    {**_OUTSIDE, **_mixer_tensors(_MIXER)},
    config=_mamba_config,
    decays=_DECAYS,
)
MAMBA2_GGUF = GGUFArchitecture(
    "Mamba2ForCausalLM",
    {**_OUTSIDE, **mamba_tensors(_MIXER)},
    config=_mamba2_config,
    decays=_DECAYS,
)
_LAYER = "model.layers.{}"
_FEED = f"{_LAYER}.feed_forward"
JAMBA_GGUF = GGUFArchitecture(
    "JambaForCausalLM",
    {
        **DECODER_TENSORS,
        **_mixer_tensors(f"{_LAYER}.mamba"),
        "output_norm": "model.final_layernorm",
        "blk.{}.ffn_norm": f"{_LAYER}.pre_ff_layernorm",
        "blk.{}.ffn_gate_inp": f"{_FEED}.router",
        **{f"blk.{{}}.ffn_{one}": f"{_FEED}.{one}_proj" for one in ("gate", "up", "down")},
        **{
            f"blk.{{}}.ffn_{one}_exps": f"{_FEED}.experts.{{}}.{one}_proj"
            for one in ("gate", "up", "down")
        },
    },
    config=_jamba_config,
    decays=_DECAYS,
)
