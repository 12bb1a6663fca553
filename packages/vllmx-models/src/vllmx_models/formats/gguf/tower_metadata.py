"""Metadata and layers that towers in GGUF files have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.tower_weights import Entry


def block_count(header: GGUFHeader) -> int:
    return header.integer("vision.block_count", high=1024)


def colours(header: GGUFHeader) -> dict[str, Any]:
    """Mean and deviation of each colour, by default 0.5."""
    found = {}
    for key in ("image_mean", "image_std"):
        values = header.metadata.get(f"clip.vision.{key}")
        given = isinstance(values, np.ndarray) and values.dtype.kind == "f" and len(values) == 3
        if values is not None and not given:
            raise header.error(f"vision.{key}", "must be three numbers")
        found[key] = [0.5] * 3 if values is None else [float(one) for one in values]
    return found


def layer_entries(header: GGUFHeader, theirs: str, names: Mapping[str, str]) -> Iterator[Entry]:
    """Yields the weights of each layer that are one tensor in both formats."""
    for layer in range(block_count(header)):
        for stored, name in names.items():
            yield Entry(f"{theirs}.{layer}.{name}", (f"v.blk.{layer}.{stored}",))


def feed_forward(header: GGUFHeader) -> tuple[str, str]:
    """The names of the widening and the narrowing matrix, which are swapped in old files."""
    down = header.tensors.get("v.blk.0.ffn_down.weight")
    swapped = down is not None and down.shape[-1] == header.integer("vision.embedding_length")
    inner = header.integer("vision.feed_forward_length", 0, low=0)
    if swapped and inner != header.integer("vision.embedding_length"):
        return "ffn_down", "ffn_up"
    return "ffn_up", "ffn_down"


def activation(header: GGUFHeader) -> str:
    """The activation between the matrices of a layer, as config.json names it."""
    flags = {"use_silu": "silu", "use_gelu": "gelu"}
    return next((name for key, name in flags.items() if header.flag(key, False)), "quick_gelu")
