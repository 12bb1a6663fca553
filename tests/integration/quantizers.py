"""Plain quantisers: each turns a float32 matrix into a module's tensors in one checkpoint format.

They round to the nearest value and pack by shifting whole arrays; the second result is what the
tensors mean, from the integers before they were packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Quantised = tuple[dict[str, Array], Array]
"""Suffix -> tensor, and the float32 matrix."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def grouped(weight: Array, group_of: Array, bits: int) -> tuple[Array, Array, Array]:
    """Integers (rows, cols), zero points and float16 scales (rows, groups), by least and greatest
    value of each group."""
    groups = int(group_of.max()) + 1
    top = 2**bits - 1
    zeros = np.empty((len(weight), groups), np.int64)
    scales = np.empty((len(weight), groups), np.float16)
    integers = np.empty(weight.shape, np.int64)
    for group in range(groups):
        values = weight[:, group_of == group]
        low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
        scale = np.maximum((high - low) / top, 1e-4).astype(np.float16)
        zero = np.clip(np.rint(-low / scale), 1, top).astype(np.int64)
        scales[:, group], zeros[:, group] = scale, zero
        rounded = np.rint(values / scale[:, None].astype(np.float32)) + zero[:, None]
        integers[:, group_of == group] = np.clip(rounded, 0, top)
    return integers, zeros, scales


def meaning(integers: Array, zeros: Array, scales: Array, group_of: Array) -> Array:
    difference = (integers - zeros[:, group_of]).astype(np.float32)
    return difference * scales.astype(np.float32)[:, group_of]


def pack_rows(integers: Array, bits: int) -> Array:
    """(n, count) integers -> (n, count * bits / 32) int32, each row one string of bits."""
    shifts = np.arange(bits)
    string = (integers[..., None] >> shifts & 1).reshape(len(integers), -1).astype(np.uint8)
    string = np.pad(string, ((0, 0), (0, -string.shape[1] % 32)))
    return np.packbits(string, axis=1, bitorder="little").view("<i4")


def gptq(weight: Array, *, bits: int, group_size: int, shuffled: bool, v2: bool) -> Quantised:
    cols = weight.shape[1]
    group_of = np.arange(cols, dtype=np.int32) // group_size
    if shuffled:
        group_of = np.random.default_rng(cols).permutation(group_of)
    integers, zeros, scales = grouped(weight, group_of, bits)
    stored = zeros if v2 else (zeros - 1) % 2**bits
    tensors = {
        "qweight": np.ascontiguousarray(pack_rows(integers, bits).T),
        "qzeros": pack_rows(stored.T, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": group_of,
    }
    return tensors, meaning(integers, zeros, scales, group_of)


def awq(weight: Array, *, group_size: int) -> Quantised:
    group_of = np.arange(weight.shape[1], dtype=np.int32) // group_size
    integers, zeros, scales = grouped(weight, group_of, 4)

    def pack(values: Array) -> Array:  # (n, rows) -> (n, rows / 8)
        ordered = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
        return pack_rows(ordered.reshape(values.shape), 4)

    tensors = {
        "qweight": pack(integers.T),
        "qzeros": pack(zeros.T),
        "scales": np.ascontiguousarray(scales.T),
    }
    return tensors, meaning(integers, zeros, scales, group_of)


def pack_quantized(weight: Array, *, bits: int, group_size: int) -> Quantised:
    group_of = np.arange(weight.shape[1], dtype=np.int32) // group_size
    integers, zeros, scales = grouped(weight, group_of, bits)
    tensors = {
        "weight_packed": pack_rows(integers, bits),
        "weight_shape": np.array(weight.shape),
        "weight_scale": scales,
        "weight_zero_point": np.ascontiguousarray(pack_rows(zeros.T, bits).T),
    }
    return tensors, meaning(integers, zeros, scales, group_of)


def int8(weight: Array) -> Quantised:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    integers = np.clip(np.rint(weight / wide), -128, 127).astype(np.int8)
    return {"weight": integers, "weight_scale": scale}, integers.astype(np.float32) * wide


def fp8(weight: Array, *, block: tuple[int, int], name: str, whole: bool = False) -> Quantised:
    """`whole`: the scale is stored without axes."""
    rows, cols = weight.shape
    scale = np.empty((-(-rows // block[0]), -(-cols // block[1])), np.float32)
    for i, j in np.ndindex(scale.shape):
        part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scale[i, j] = max(np.abs(part).max(), 1e-6) / 448
    wide = np.repeat(np.repeat(scale, block[0], 0)[:rows], block[1], 1)[:, :cols]
    codes = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
    stored = scale.reshape(()) if whole else scale
    return {"weight": codes, name: stored}, codes.astype(np.float32) * wide


def mlx_affine(weight: Array, *, bits: int, group_size: int) -> Quantised:
    """Quantises each group between its least and its greatest value."""
    groups = weight.reshape(len(weight), -1, group_size)
    low = groups.min(2).astype(np.float16)
    step = ((groups.max(2) - low) / (2**bits - 1)).astype(np.float16)
    wide = np.maximum(step.astype(np.float32), 1e-6)[..., None]
    codes = np.rint((groups - low[..., None].astype(np.float32)) / wide)
    codes = np.clip(codes, 0, 2**bits - 1).astype(np.int64)
    means = codes.astype(np.float32) * step[..., None] + low[..., None]
    packed = pack_rows(codes.reshape(weight.shape), bits).view("<u4")
    tensors = {"weight": packed, "scales": step, "biases": low}
    return tensors, means.astype(np.float32).reshape(weight.shape)


def nvfp4(weight: Array) -> Quantised:
    blocks = weight.reshape(len(weight), -1, 16)
    whole = np.float32(np.abs(weight).max() / (6 * 448))
    scale = (np.abs(blocks).max(2) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
    wide = scale.astype(np.float32) * whole
    packed, values = _e2m1(blocks / np.maximum(wide, 1e-12)[..., None])
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": np.array(whole)}
    return tensors, values * np.repeat(wide, 16, axis=1)


def mxfp4(weight: Array) -> Quantised:
    """As DeepSeek names the tensors and their types."""
    blocks = weight.reshape(len(weight), -1, 32)
    exponent = np.ceil(np.log2(np.abs(blocks).max(2) / 6))
    scale = np.exp2(exponent).astype(np.float32)
    packed, values = _e2m1(blocks / scale[..., None])
    tensors = {"weight": packed.view(np.int8), "scale": scale.astype(ml_dtypes.float8_e8m0fnu)}
    return tensors, values * np.repeat(scale, 32, axis=1)


def _e2m1(ratio: Array) -> tuple[Array, Array]:
    """The nearest codes (rows, cols / 2) of (rows, groups, group) values, and what they mean."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    codes = np.abs(ratio[..., None] - values).argmin(-1).reshape(len(ratio), -1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), values[codes]


def ct_config(weights: Mapping[str, Any], activations: Any = None) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
