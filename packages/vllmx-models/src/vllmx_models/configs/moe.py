"""What the configs of models with experts say alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from vllmx_core.ops.experts import ExpertsSpec

from vllmx_models.blocks.layer import FeedForward
from vllmx_models.config import ConfigReader
from vllmx_models.trunks.decoder import LayerSpec

EXPERT_KEYS = ("num_experts", "num_local_experts")
"""Two names of the same; transformers writes one for the other."""
MOST_EXPERTS = 1 << 14
SPLIT = "split_experts"
"""Set by readers of GGUF files, which have gate and up apart where checkpoints have them as one."""


def num_experts(read: ConfigReader, keys: Sequence[str] = EXPERT_KEYS) -> int:
    """The number of experts, under the first of these keys that is there."""
    return read.integer(next((key for key in keys if read.has(key)), keys[0]), high=MOST_EXPERTS)


def chosen_experts(read: ConfigReader, count: int) -> int:
    """How many of `count` experts a token asks."""
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
    """The same layers, those of `numbers` with another feed-forward."""
    return tuple(
        replace(layer, feed_forward=feed_forward) if number in numbers else layer
        for number, layer in enumerate(layers)
    )
