"""MiMo-V2-Flash (MiMoV2FlashForCausalLM): values have smaller heads than keys. Five of six layers
have a window, sinks and twice the key/value heads; DeepSeek V3's experts without a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vllmx_models.blocks.attention import AttentionMixer, AttentionNames
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.blocks.rope import Rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    num_layers,
    sliding_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, sparse_layers
from vllmx_models.families.deepseek import (
    DEEPSEEK_EXPERTS,
    expert_states,
    shared_experts,
    sigmoid_router,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    GGUFArchitecture,
    sigmoid_experts_config,
)
from vllmx_models.formats.gguf.hybrids import KV_HEADS, kv_heads_of, of_each_layer
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec
from vllmx_models.trunks.heads import HeadNames

DEFAULTS: Mapping[str, Any] = {
    "attention_value_scale": 0.707,
    "first_k_dense_replace": 1,
    "head_dim": 192,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "partial_rotary_factor": 0.334,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5_000_000.0,
    "routed_scaling_factor": 1.0,
    "sliding_window": 129,
    "swa_rope_theta": 10_000.0,
    "topk_group": 1,
    "v_head_dim": 128,
}
"""The defaults of transformers for absent keys."""
_KINDS = ("full_attention", "sliding_attention")
_PREDICTION_NORMS = LayerNorms("input_layernorm", None, "pre_mlp_layernorm")
_SINKS = ("add_full_attention_sink_bias", "add_swa_attention_sink_bias")


def mimo_v2_flash(config: Mapping[str, Any]) -> Decoder:
    """Layers with experts, windows and sinks are the config's."""
    read = ConfigReader(_renamed(config), "MiMoV2FlashForCausalLM")
    read.refuse_quirks(
        "attention_bias", "layer_types", "partial_rotary_factor", "sliding_window", *EXPERT_KEYS
    )
    for key in ("head_dim", "v_head_dim", "num_attention_heads"):
        if read.has(f"swa_{key}") and read.config[f"swa_{key}"] != read.config.get(key):
            raise read.error(f"swa_{key}", f"must be {key}")
    count = num_layers(read)
    sliding = sliding_layers(read, [layer > 0 and (layer + 1) % 6 != 0 for layer in range(count)])
    positions = read.integer("max_position_embeddings")
    ropes = layer_ropes(read, head_size(read), sliding, default_positions=positions)
    mixers = [_mixer(read, rope, slides) for rope, slides in zip(ropes, sliding, strict=True)]
    moe, dense = shared_experts(read, sigmoid_router), dense_mlp(read)
    fed: list[FeedForward] = [moe if sparse else dense for sparse in sparse_layers(read)]
    layers = tuple(LayerSpec(*blocks) for blocks in zip(mixers, fed, strict=True))
    (rope,) = layer_ropes(read, head_size(read), [True], default_positions=positions)
    predicting = LayerSpec(_mixer(read, rope, True), dense, _PREDICTION_NORMS)
    spec = decoder_spec(read, layers, default_positions=positions)
    return Decoder(replace(spec, prediction=_prediction(count, predicting)))


def _prediction(num_layers: int, layer: LayerSpec) -> HeadNames:
    """The first of three layers of multi-token prediction, which have a window and no experts."""
    module, in_file = "model.mtp.layers.0", f"model.layers.{num_layers}"
    return HeadNames(
        "model.mtp.layers",
        module,
        norm="final_layernorm",
        blocks=(layer,),
        also=(
            (f"{module}.pre_mlp_layernorm.", f"{in_file}.post_attention_layernorm."),
            (f"{module}.", f"{in_file}."),
        ),
    )


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with transformers' names of keys in place of the published ones. The published
    window does not count the token itself."""
    given = {key: value for key, value in config.items() if value is not None}
    found: dict[str, Any] = {**DEFAULTS, **given}
    for old, new, names in (
        ("hybrid_layer_pattern", "layer_types", _KINDS),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        kinds = found.get(old)
        if isinstance(kinds, list) and all(one in (0, 1) for one in kinds):
            found = {new: [names[int(one)] for one in kinds], **found}
            del found[old]
    if type(found.get("sliding_window_size")) is int:
        found["sliding_window"] = found["sliding_window_size"] + 1
    found["rms_norm_eps"] = found.get("layernorm_epsilon", found["rms_norm_eps"])
    if not found.get("rope_parameters"):
        thetas = (found["rope_theta"], found["swa_rope_theta"])
        found["rope_parameters"] = {
            kind: {"rope_theta": theta} for kind, theta in zip(_KINDS, thetas, strict=True)
        }
    return found


def _mixer(read: ConfigReader, rope: Rope | None, slides: bool) -> AttentionMixer:
    bias, head = read.flag("attention_bias", False), head_size(read)
    mixer = attention_mixer(
        read,
        head,
        rope=rope,
        window=read.integer("sliding_window", high=1 << 31) if slides else None,
        qkv_bias=bias,
        value_size=read.integer("v_head_dim", high=head),
        value_scale=read.number("attention_value_scale"),
        sinks=read.flag(_SINKS[slides], slides),
        names=AttentionNames(sinks="attention_sink_bias"),
    )
    if not slides:
        return mixer
    kv_heads = read.integer("swa_num_key_value_heads", 2 * mixer.num_kv_heads, high=1 << 16)
    if mixer.num_heads % kv_heads:
        raise read.error("swa_num_key_value_heads", f"must divide {mixer.num_heads} query heads")
    return replace(mixer, num_kv_heads=kv_heads)


_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_VALUES, _SCALE, _LOCAL_THETA = (
    "attention.value_length", "attention.value_scale", "rope.freq_base_swa",
)  # fmt: skip


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Adds the sizes of values and of layers with a window to what files of experts state."""
    kv_heads, name = of_each_layer(header, KV_HEADS), header.architecture
    alike = {f"{name}.{KV_HEADS}": kv_heads[0]}
    alike[f"{name}.{_VALUES}"] = header.integer("attention.key_length")
    config = sigmoid_experts_config(
        replace(header, metadata={**header.metadata, **alike}),
        _WINDOW, _PATTERN, _SCALE, _LOCAL_THETA, renormalised=True,
    )  # fmt: skip
    count = config["num_hidden_layers"]
    slides = header.flags(_PATTERN, header.integer("block_count"))[:count]
    whole, local = (
        [n for n, one in zip(kv_heads, slides, strict=False) if one == kind]
        for kind in (False, True)
    )
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(count)]
    return config | {
        "layer_types": [_KINDS[one] for one in slides],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "num_key_value_heads": (whole or local)[0],
        "swa_num_key_value_heads": (local or whole)[0],
        "sliding_window": header.integer(_WINDOW),
        "v_head_dim": header.integer(_VALUES),
        "attention_value_scale": header.number(_SCALE, 1.0),
        "swa_rope_theta": header.number(_LOCAL_THETA, config["rope_theta"]),
        "add_full_attention_sink_bias": _sinks(header, slides, False),
        "add_swa_attention_sink_bias": _sinks(header, slides, True),
    }


def _sinks(header: GGUFHeader, slides: list[bool], kind: bool) -> bool:
    layers = [layer for layer, one in enumerate(slides) if one == kind]
    return any(f"blk.{layer}.attn_sinks.weight" in header.tensors for layer in layers)


def _states(spec: DecoderSpec) -> dict[str, Any]:
    mixers = [mixer for mixer in spec.mixers if isinstance(mixer, AttentionMixer)]
    ropes = [one.rope for one in mixers if one.window is not None and one.rope is not None]
    local = {_LOCAL_THETA: float(ropes[0].theta)} if ropes else {}
    return {
        **expert_states(spec),
        KV_HEADS: kv_heads_of(spec),
        _PATTERN: np.array([mixer.window is not None for mixer in mixers]),
        _SCALE: mixers[0].value_scale,
        **local,
    }


GGUF = GGUFArchitecture(
    "MiMoV2FlashForCausalLM",
    {
        **DECODER_TENSORS,
        **DEEPSEEK_EXPERTS,
        "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.attention_sink_bias",
        "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
        "blk.{}.layer_output_norm": "model.layers.{}.final_layernorm",
    },
    config=_gguf_config,
    states=_states,
)
"""The last two are of multi-token prediction alone."""
