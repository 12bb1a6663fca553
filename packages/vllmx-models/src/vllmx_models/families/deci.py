"""DeciLM and Llama Nemotron Super and Ultra (DeciLMForCausalLM, arXiv:2411.19146): Llama's layers,
each with its own groups of heads and MLP width, and some without attention or without an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import PRE
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.trunks.decoder import Decoder, LayerSpec

DEFAULT_POSITIONS = 2048
MULTIPLE = 256
"""The widths of MLPs are rounded up to a multiple of it."""
_OTHERS = (
    "num_sink_tokens",
    "replace_with_linear",
    "sparsify",
    "unshifted_sink",
    "use_prefill_window_in_sink_attention",
    "window_length",
)
"""Replacements of blocks that a search may choose; published models have none of them."""


def decilm(config: Mapping[str, Any]) -> Decoder:
    """`block_configs` has an entry for each layer."""
    read = ConfigReader(config, "DeciLMForCausalLM")
    read.refuse_quirks("attention_bias", "block_configs", "mlp_bias")
    count, blocks = num_layers(read), read.config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise read.error("block_configs", f"must have an entry for each of the {count} layers")
    [rope] = layer_ropes(read, head_size(read), [False], default_positions=DEFAULT_POSITIONS)
    bias = read.flag("attention_bias", False)
    heads = read.integer("num_attention_heads", high=1 << 16)
    layers = []
    for block in blocks:
        attention, ffn = (_part(read, block, name) for name in ("attention", "ffn"))
        layer = LayerSpec(None, None, PRE)
        if not attention.flag("no_op", False):
            group = attention.integer("n_heads_in_group", high=heads)
            grouped = {**read.config, "num_key_value_heads": heads // group}
            mixer = attention_mixer(
                ConfigReader(grouped, read.architecture),
                head_size(read),
                rope=rope,
                qkv_bias=bias,
                o_bias=bias,
            )
            layer = replace(layer, mixer=mixer)
        else:
            layer = replace(layer, norms=replace(layer.norms, before_mixer=None))
        if not ffn.flag("no_op", False):
            layer = replace(layer, feed_forward=_mlp(read, ffn))
        else:
            layer = replace(layer, norms=replace(layer.norms, before_mlp=None))
        layers.append(layer)
    return Decoder(decoder_spec(read, tuple(layers), default_positions=DEFAULT_POSITIONS))


def _part(read: ConfigReader, block: Any, name: str) -> ConfigReader:
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise read.error("block_configs", f"must have an object as {name} of each layer")
    for key in _OTHERS:
        if part.get(key):
            raise read.error("block_configs", f"has {key}, which is not known here")
    return ConfigReader(part, read.architecture)


def _mlp(read: ConfigReader, ffn: ConfigReader) -> FeedForward:
    size = int(2 * ffn.number("ffn_mult") * read.integer("hidden_size") / 3)
    if not 0 < size <= 1 << 24:
        raise read.error("block_configs", "has an ffn_mult that gives no width")
    width = -(-size // MULTIPLE) * MULTIPLE
    return DenseMLP(width, read.activation(), bias=read.flag("mlp_bias", False))
