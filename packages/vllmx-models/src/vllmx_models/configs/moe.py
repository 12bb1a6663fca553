"""Config keys shared by models with experts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.ops.experts import ExpertsSpec

from vllmx_models.blocks.layer import FeedForward
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp, num_layers
from vllmx_models.trunks.decoder import LayerSpec

EXPERT_KEYS = ("num_experts", "num_local_experts")
"""Synonyms: transformers maps one to the other."""
MOST_EXPERTS = 1 << 14
SPLIT = "split_experts"
"""Set for GGUF files, which store gate and up apart where checkpoints fuse them."""


def num_experts(read: ConfigReader, keys: Sequence[str] = EXPERT_KEYS) -> int:
    """The number of experts, from the first key that is present."""
    return read.integer(next((key for key in keys if read.has(key)), keys[0]), high=MOST_EXPERTS)


def chosen_experts(read: ConfigReader, count: int) -> int:
    """The number of experts that process a token, at most `count`."""
    chosen = read.integer("num_experts_per_tok")
    if chosen > count:
        raise read.error("num_experts_per_tok", f"must be at most {count}, the number of experts")
    return chosen


def experts_spec(read: ConfigReader) -> ExpertsSpec:
    """Gated experts with the model's activation."""
    return ExpertsSpec(read.activation())


def layer_numbers(read: ConfigReader, key: str) -> frozenset[int]:
    """A list of layers; empty where the key is absent."""
    if not read.has(key):
        return frozenset()
    numbers = read.config[key]
    if not isinstance(numbers, list) or any(type(one) is not int for one in numbers):
        raise read.error(key, "must be a list of layers")
    return frozenset(numbers)


def with_feed_forward(
    layers: Iterable[LayerSpec], numbers: Collection[int], feed_forward: FeedForward
) -> tuple[LayerSpec, ...]:
    """The layers with `feed_forward` in those at `numbers`."""
    return tuple(
        replace(layer, feed_forward=feed_forward) if number in numbers else layer
        for number, layer in enumerate(layers)
    )


def with_dense_layers(read: ConfigReader, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers with an MLP where `sparse_layers` has no experts."""
    dense = [number for number, has_experts in enumerate(sparse_layers(read)) if not has_experts]
    return with_feed_forward(layers, dense, dense_mlp(read)) if dense else layers


def sparse_layers(read: ConfigReader) -> list[bool]:
    """True for each layer with experts, by `mlp_layer_types` or `first_k_dense_replace`."""
    count = num_layers(read)
    if read.has("mlp_layer_types"):
        types: Any = read.config["mlp_layer_types"]
        known = ("dense", "sparse")
        if not isinstance(types, list) or any(kind not in known for kind in types):
            raise read.error("mlp_layer_types", f"must be a list of {' or '.join(known)}")
        if len(types) < count:
            raise read.error("mlp_layer_types", f"must have an entry for each of {count} layers")
        return [kind == "sparse" for kind in types[:count]]
    if read.integer("moe_layer_freq", 1) != 1:
        raise read.error("moe_layer_freq", "is not known here: experts in each layer, 1")
    dense = read.integer("first_k_dense_replace", low=0)
    return [layer >= dense for layer in range(count)]
