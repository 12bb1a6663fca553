"""What GGUF files of models with recurrent layers beside attention have alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.errors import UnsupportedModelError

from vllmx_models.gguf.hyperparameters import GGUFHeader

KV_HEADS, INNER = "attention.head_count_kv", "feed_forward_length"
NEXT_TOKENS: Mapping[str, str] = {
    f"blk.{{}}.nextn.{name}": f"model.layers.{{}}.nextn.{name}"
    for name in (
        "eh_proj",
        "embed_tokens",
        "enorm",
        "hnorm",
        "shared_head_head",
        "shared_head_norm",
    )
}
"""Of layers of multi-token prediction, which nobody reads."""


def mamba_tensors(module: str) -> dict[str, str]:
    """The names of Mamba-2's; `module` has a place for the layer."""
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_dt.bias": "dt_bias",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {f"blk.{{}}.{theirs}": f"{module}.{ours}" for theirs, ours in names.items()}


def of_each_layer(header: GGUFHeader, key: str) -> list[int]:
    """A value for each layer; 0 says that it has none of these."""
    return header.integers(key, header.integer("block_count"), low=0)


def alike(header: GGUFHeader, *keys: str) -> GGUFHeader:
    """The header with one value for these keys in place of one for each layer: that of the layers
    which have any."""
    made: dict[str, Any] = {}
    for key in keys:
        values = set(of_each_layer(header, key)) - {0} if header.has(key) else set()
        if len(values) > 1:
            raise UnsupportedModelError(
                f"{header.path}: {header.architecture}.{key} differs from layer to layer, which"
                " this architecture does not have here"
            )
        if values:
            made[f"{header.architecture}.{key}"] = values.pop()
    return replace(header, metadata={**header.metadata, **made})


def has_tensor(header: GGUFHeader, name: str) -> bool:
    """Whether any layer has a tensor of this name."""
    return any(one.startswith("blk.") and one.endswith(f".{name}") for one in header.tensors)
