"""Spans of the emulated device's memory as arrays, and products of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16, float8_to_f32
from vllmx_cuda.device.device import Product
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs.codes8 import BLOCK
from vllmx_cuda.kernel_specs.types import ceil_div


def array(memory: Memory, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The span as a flat array over the same bytes."""
    begin = memory.address - memory.owner.ctypes.data
    span: npt.NDArray[Any] = memory.owner[begin : begin + memory.num_bytes].view(dtype)
    return span


NUMPY_TYPES = {
    "bf16": np.uint16,
    "f16": np.float16,
    "f32": np.float32,
    "i8": np.int8,
    "i32": np.int32,
    "f8e4m3": np.uint8,
}
"""The type that numpy has for an array in memory; bf16 and f8e4m3 are their bits."""


def wide(memory: Memory, dtype: str) -> npt.NDArray[np.float32]:
    """Reads an array of memory as float32."""
    values = array(memory, NUMPY_TYPES[dtype])
    if dtype == "f8e4m3":
        return float8_to_f32(values, dtype)
    return bf16_to_f32(values) if dtype == "bf16" else values.astype(np.float32)


def rounded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Rounds values as an array of that type takes them."""
    return f32_to_bf16(values) if dtype == "bf16" else values


def multiply(
    p: Product,
    x: Memory,
    w: Memory,
    y: Memory,
    bias: Memory | None,
    scales: tuple[Memory, Memory] | None,
) -> None:
    """Writes x times w transposed, of matrices of `p.dtype`, with a bias and scales by blocks."""
    left = wide(x, p.dtype)[: p.m * p.k].reshape(p.m, p.k)
    right = wide(w, p.dtype)[: p.n * p.k].reshape(p.n, p.k)
    with np.errstate(over="ignore", invalid="ignore"):
        if p.blocks:
            assert scales is not None
            groups = ceil_div(p.k, BLOCK)
            of_x, of_w = wide(scales[0], "f32"), wide(scales[1], "f32")
            left = left * _spread(of_x[: groups * p.m].reshape(groups, p.m).T, p.k)
            pitch, blocks = ceil_div(groups, 4) * 4, ceil_div(p.n, BLOCK)
            by_rows = of_w[: blocks * pitch].reshape(blocks, pitch)
            right = right * _spread(np.repeat(by_rows, BLOCK, 0)[: p.n], p.k)
    with np.errstate(over="ignore", invalid="ignore"):  # a row with NaN is the sampler's to refuse
        # sums of products of int8 are exact in float64
        result: npt.NDArray[Any] = left @ right.T
        if p.dtype == "i8":
            result = left.astype(np.float64) @ right.T
        if p.biased:
            assert bias is not None
            result += wide(bias, p.out_dtype)[: p.n]
        found = rounded(result, p.out_dtype)
        values, pitch = array(y, NUMPY_TYPES[p.out_dtype]), p.pitch or p.n
        for row in range(p.m):
            values[row * pitch : row * pitch + p.n] = found[row]


def _spread(scales: npt.NDArray[np.float32], columns: int) -> npt.NDArray[np.float32]:
    """(rows, columns) from one for each 128 columns."""
    return np.repeat(scales, BLOCK, 1)[:, :columns]
