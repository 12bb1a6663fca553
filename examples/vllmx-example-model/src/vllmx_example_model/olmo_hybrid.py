"""OLMo Hybrid (OlmoHybridForCausalLM): three gated delta nets for each layer of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.weights.spec import WeightSpec
from vllmx_models.blocks.layer import renamed
from vllmx_models.blocks.norms import POST, PRE
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
from vllmx_models.trunks.decoder import Decoder, LayerSpec

POSITIONS = 65536
RENAMED = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Norms by the names of published files."""
NAMES = DeltaNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    conv=("q_conv1d", "k_conv1d", "v_conv1d"),
    z="g_proj",
    a="a_proj",
    b="b_proj",
    norm="o_norm",
    out="o_proj",
)
KINDS = ("linear_attention", "full_attention")


def olmo_hybrid(config: Mapping[str, Any]) -> Decoder:
    """`layer_types` says which layers attend; released models have a rope_theta of null, which
    rotates nothing."""
    read = ConfigReader(config, "OlmoHybridForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types")
    bias, count = read.flag("attention_bias", False), num_layers(read)
    every_fourth = [KINDS[layer % 4 == 3] for layer in range(count)]
    types = read.config.get("layer_types") or every_fourth
    if not isinstance(types, list) or len(types) != count or not set(types) <= set(KINDS):
        raise read.error("layer_types", f"must be {count} of {' or '.join(KINDS)}")
    rotation = read.config.get("rope_parameters") or read.config
    rotates = rotation.get("rope_theta", 0) is not None
    (rope,) = layer_ropes(read, head_size(read), [False], default_positions=POSITIONS)
    attention = attention_mixer(
        read,
        head_size(read),
        rope=rope if rotates else None,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=rms(read),
        norm_weights="across",
    )
    mlp = dense_mlp(read)
    both = {
        "linear_attention": LayerSpec(delta(read), mlp, PRE),
        "full_attention": LayerSpec(attention, mlp, POST),
    }
    layers = tuple(both[kind] for kind in types)
    return OlmoHybrid(decoder_spec(read, layers, default_positions=POSITIONS))


class OlmoHybrid(Decoder):
    """The decoder that reads norms by either name."""

    def trunk_weights(self) -> tuple[WeightSpec, ...]:
        specs = super().trunk_weights()
        for layer in range(len(self.spec.layers)):
            for name, other in RENAMED.items():
                names = [f"model.layers.{layer}.{one}" for one in (name, other)]
                specs = tuple(renamed(spec, *names) for spec in specs)
        return specs


def delta(read: ConfigReader) -> DeltaMixer:
    """A token writes up to twice of what its key lacks where eigenvalues may be negative."""
    if read.activation() != "silu":
        raise read.error("hidden_act", "must be silu, which convolutions and gates have")
    heads = read.integer("num_attention_heads")
    keys = read.integer("linear_num_key_heads", heads)
    values = read.integer("linear_num_value_heads", heads)
    if values % keys:
        raise read.error("linear_num_value_heads", f"must be a multiple of {keys} key heads")
    size = read.integer("linear_key_head_dim", 3 * read.integer("hidden_size") // (4 * keys))
    return DeltaMixer(
        values,
        keys,
        size,
        read.integer("linear_value_head_dim", 2 * size),
        read.integer("linear_conv_kernel_dim", 4, low=2),
        1e-5,
        beta=2.0 if read.flag("linear_allow_neg_eigval", True) else 1.0,
        names=NAMES,
    )
