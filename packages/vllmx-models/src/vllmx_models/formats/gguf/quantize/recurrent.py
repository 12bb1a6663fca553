"""Layers that keep a state as GGUF files have them: convolutions without an axis of one, decays
already made, the value heads of delta nets in the order of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
from vllmx_core.weights.part import DENSE, DType, RawTensor, WeightPart, WeightSpec, made_part

from vllmx_models.blocks.layer import LayerNames
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.recurrent import DeltaMixer
from vllmx_models.formats.gguf.quantize.header import Target
from vllmx_models.quantization.encoders import float_rows

Order = npt.NDArray[np.intp]
_CONVOLUTIONS = ("blk.{}.ssm_conv1d", "blk.{}.shortconv.conv")
_JOINED: Mapping[str, str] = {"blk.{}.attn_qkv": "qkv", "blk.{}.attn_gate": "z"}
"""What files have apart of a matrix with the rows of each key head together."""
_WITH_KEYS = ("blk.{}.attn_qkv", "blk.{}.ssm_conv1d")
_OF_VALUES = ("blk.{}.attn_gate",)
_OF_HEADS = ("blk.{}.ssm_alpha", "blk.{}.ssm_beta", "blk.{}.ssm_a", "blk.{}.ssm_dt")
_COLUMNS = "blk.{}.ssm_out"


def joined(
    target: Target, pattern: str, layer: int, present: Callable[[str], bool]
) -> WeightSpec | None:
    """The rows of a tensor that a checkpoint has within a larger one, where it has that."""
    mixer = target.spec.layers[layer].mixer
    if pattern not in _JOINED or not isinstance(mixer, DeltaMixer) or mixer.names.qkvz is None:
        return None
    names = target.spec.names
    theirs = f"{names.layers}.{layer}"
    if not present(f"{theirs}.{mixer.names.module}.{mixer.names.qkvz}.weight"):
        return None
    specs = mixer.weights(LayerNames("", theirs, target.spec.hidden_size))
    return next(spec for spec in specs if spec.name == f".{_JOINED[pattern]}")


def in_file(target: Target, pattern: str, layer: int, part: WeightPart) -> WeightPart:
    """A tensor of the checkpoint as the file has it."""
    if pattern in target.table.decays:
        part = _vector(part, -np.exp(part.dequantize()))
    if pattern in _CONVOLUTIONS and len(part.shape) == 3:
        part = _values(part, part.dequantize().reshape(part.shape[0], -1))
    mixer = target.spec.layers[layer].mixer
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
    return part if rows is None else _values(part, part.dequantize().reshape(rows, -1))


# --- the order of value heads ---------------------------------------------------------------------
def _tiled(mixer: DeltaMixer, pattern: str, part: WeightPart) -> WeightPart:
    """Reorders heads: head h lies beside the others that read key head h % Hk in turn."""
    size = 1 if pattern in _OF_HEADS else mixer.value_size
    order = _tiled_order(mixer, size)
    if pattern == _COLUMNS:
        return _with_columns(part, order)
    if pattern in _WITH_KEYS:
        keys = 2 * mixer.num_key_heads * mixer.key_size
        order = np.concatenate([np.arange(keys), keys + order])
    elif pattern not in (*_OF_VALUES, *_OF_HEADS):
        return part
    if len(part.shape) == 1:
        return _vector(part, part.dequantize()[order])
    return made_part(part.name, part.shape, DENSE, partial(_rows, part, order))


def _tiled_order(mixer: DeltaMixer, size: int) -> Order:
    """The row that each row comes from, where each head has `size` of them."""
    heads = np.arange(mixer.num_heads * size).reshape(mixer.num_key_heads, -1, size)
    return heads.swapaxes(0, 1).reshape(-1)


def _rows(part: WeightPart, order: Order, begin: int, end: int) -> WeightPart:
    wanted = order[begin:end]
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
    pieces = [float_rows(part, int(run[0]), int(run[-1]) + 1) for run in runs]
    data = np.concatenate([piece.data for piece in pieces])
    return _dense(part.name, pieces[0].dtype, (end - begin, *part.shape[1:]), data)


def _with_columns(part: WeightPart, order: Order) -> WeightPart:
    def make(begin: int, end: int) -> WeightPart:
        raw = float_rows(part, begin, end)
        values = raw.data.reshape(end - begin, part.shape[1], -1)[:, order]
        return _dense(part.name, raw.dtype, raw.shape, np.ascontiguousarray(values).reshape(-1))

    return made_part(part.name, part.shape, DENSE, make)


# --- parts ----------------------------------------------------------------------------------------
def _vector(part: WeightPart, values: npt.NDArray[np.float32]) -> WeightPart:
    return _values(part, values.reshape(-1))


def _values(part: WeightPart, values: npt.NDArray[np.float32]) -> WeightPart:
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return _dense(part.name, "f32", values.shape, flat)


def _dense(
    name: str, dtype: DType, shape: tuple[int, ...], data: npt.NDArray[np.uint8]
) -> WeightPart:
    return WeightPart(name, shape, DENSE, {"weight": RawTensor(name, dtype, shape, data)})
