"""Recurrent layers in the form of GGUF files: convolutions without an axis of one, decays as -exp,
the value heads of delta nets in the order of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from vllmx_core.weights.part import Index, WeightPart, dense_part
from vllmx_core.weights.spec import WeightSpec
from vllmx_core.weights.views import columns_at, rows_of

from vllmx_models.blocks.layer import LayerNames
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.recurrent import DeltaMixer
from vllmx_models.formats.gguf.quantize.header import Target

_CONVOLUTIONS = ("blk.{}.ssm_conv1d", "blk.{}.shortconv.conv")
_JOINED: Mapping[str, str] = {"blk.{}.attn_qkv": "qkv", "blk.{}.attn_gate": "z"}
"""Tensors that files split from a matrix that has the rows of each key head together."""
_WITH_KEYS = ("blk.{}.attn_qkv", "blk.{}.ssm_conv1d")
_OF_VALUES = ("blk.{}.attn_gate",)
_OF_HEADS = ("blk.{}.ssm_alpha", "blk.{}.ssm_beta", "blk.{}.ssm_a", "blk.{}.ssm_dt")
_COLUMNS = "blk.{}.ssm_out"


def joined(
    target: Target, pattern: str, layer: int, present: Callable[[str], bool]
) -> WeightSpec | None:
    """The rows of a tensor that a checkpoint stores within a larger one, if it does."""
    mixer = target.layers[layer].mixer
    if pattern not in _JOINED or not isinstance(mixer, DeltaMixer) or mixer.names.qkvz is None:
        return None
    theirs = target.module_of(layer)
    if not present(f"{theirs}.{mixer.names.module}.{mixer.names.qkvz}.weight"):
        return None
    specs = mixer.weights(LayerNames("", theirs, target.spec.hidden_size))
    return next(spec for spec in specs if spec.name == f".{_JOINED[pattern]}")


def in_file(target: Target, pattern: str, layer: int, part: WeightPart) -> WeightPart:
    """Converts a tensor of the checkpoint to the file's form."""
    if pattern in target.table.decays:
        part = dense_part(part.name, -np.exp(part.dequantize()))
    if pattern in _CONVOLUTIONS and len(part.shape) == 3:
        part = dense_part(part.name, part.dequantize().reshape(part.shape[0], -1))
    mixer = target.layers[layer].mixer
    if isinstance(mixer, MambaMixer):
        return _of_mamba(mixer, pattern, part)
    if isinstance(mixer, DeltaMixer) and target.table.tiled_heads and not mixer.tiled:
        return _tiled(mixer, pattern, part)
    return part


def _of_mamba(mixer: MambaMixer, pattern: str, part: WeightPart) -> WeightPart:
    """Vectors of a head or a group are matrices."""
    rows = {
        "blk.{}.ssm_a": mixer.num_heads,
        "blk.{}.ssm_d": mixer.num_heads,
        "blk.{}.ssm_norm": mixer.num_groups,
    }.get(pattern)
    return part if rows is None else dense_part(part.name, part.dequantize().reshape(rows, -1))


# --- the order of value heads ---------------------------------------------------------------------
def _tiled(mixer: DeltaMixer, pattern: str, part: WeightPart) -> WeightPart:
    """Reorders heads so that head h reads key head h % Hk."""
    size = 1 if pattern in _OF_HEADS else mixer.value_size
    order = _tiled_order(mixer, size)
    if pattern == _COLUMNS:
        return columns_at(part, order)
    if pattern in _WITH_KEYS:
        keys = 2 * mixer.num_key_heads * mixer.key_size
        order = np.concatenate([np.arange(keys), keys + order])
    elif pattern not in (*_OF_VALUES, *_OF_HEADS):
        return part
    if len(part.shape) == 1:
        return dense_part(part.name, part.dequantize()[order])
    return rows_of(part, order)


def _tiled_order(mixer: DeltaMixer, size: int) -> Index:
    """The source row of each row, with `size` rows for each head."""
    heads = np.arange(mixer.num_heads * size).reshape(mixer.num_key_heads, -1, size)
    return heads.swapaxes(0, 1).reshape(-1)
