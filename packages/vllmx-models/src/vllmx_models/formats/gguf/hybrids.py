"""Metadata shared by GGUF files of models that mix recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import DecoderSpec

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
"""Tensors of multi-token prediction, which are not used."""


def mamba_tensors(module: str) -> dict[str, str]:
    """The names of Mamba-2's tensors; `module` has a place for the layer."""
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


def mamba_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys of config.json for Mamba-2, as Granite 4 and Falcon-H1 name them."""
    return {
        "mamba_n_heads": header.integer("ssm.time_step_rank"),
        "mamba_d_ssm": header.integer("ssm.inner_size"),
        "mamba_n_groups": header.integer("ssm.group_count"),
        "mamba_d_state": header.integer("ssm.state_size"),
        "mamba_d_conv": header.integer("ssm.conv_kernel"),
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(header, "ssm_in.bias"),
    }


def attention_of(spec: DecoderSpec) -> AttentionMixer:
    """The attention of the first layer with attention. Raises UnsupportedModelError."""
    found = next((one for one in spec.mixers if isinstance(one, AttentionMixer)), None)
    if found is None:
        raise UnsupportedModelError(
            "a model without a layer of attention has no form in GGUF files here"
        )
    return found


def kv_heads_of(spec: DecoderSpec) -> NDArray[np.int32]:
    """Key/value heads of each layer, for written files; 0: no attention."""
    mixers = (layer.mixer for layer in spec.layers)
    counts = [one.num_kv_heads if isinstance(one, AttentionMixer) else 0 for one in mixers]
    return np.array(counts, np.int32)


def mamba_states(spec: DecoderSpec) -> dict[str, Any]:
    """The sizes of Mamba-2, for written files. Raises UnsupportedModelError if no layer is one."""
    mixer = next((one for one in spec.mixers if isinstance(one, MambaMixer)), None)
    if mixer is None:
        raise UnsupportedModelError(
            "a model of this architecture without a layer of Mamba-2 has no form in GGUF files here"
        )
    return {
        KV_HEADS: kv_heads_of(spec),
        "ssm.time_step_rank": mixer.num_heads,
        "ssm.inner_size": mixer.width,
        "ssm.group_count": mixer.num_groups,
        "ssm.state_size": mixer.state_size,
        "ssm.conv_kernel": mixer.kernel,
    }


def of_each_layer(header: GGUFHeader, key: str) -> list[int]:
    """A value for each layer; 0 if the layer is of another kind."""
    return header.integers(key, header.integer("block_count"), low=0)


def alike(header: GGUFHeader, *keys: str) -> GGUFHeader:
    """The header with one value for these keys instead of one for each layer: the value that all
    layers with any share."""
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
    """True if any layer has a tensor of this name."""
    return any(one.startswith("blk.") and one.endswith(f".{name}") for one in header.tensors)
