"""Config keys shared by models with experts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from vllmx_core.ops.experts import ExpertsSpec

from vllmx_models.blocks.layer import FeedForward
from vllmx_models.config import ConfigReader
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
