"""Which kernel multiplies a few rows: own ones read the weights once, at the speed of memory, where
cuBLASLt is made for many rows. The choice is by size until measurements say better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllmx_cuda.kernel_specs import has_tensor_cores, vector_width
from vllmx_cuda.kernel_specs.linear import GEMV_TOKENS, MMA_K, MMA_TILES

_MMA_TOKENS = 8
"""Of one tile."""


@dataclass(frozen=True, slots=True)
class Skinny:
    """An entry of `KERNELS` with its options, but for the dtype."""

    entry: str
    options: Mapping[str, int]


def skinny_kernels(dtype: str, cols: int, out_dtype: str, arch: int) -> dict[int, Skinny]:
    """Number of rows -> kernel; cuBLASLt takes the numbers that are missing, and float32, which is
    for checks and not for speed. Tensor cores from two rows on where columns and `arch`,
    as 75 or 90, allow it."""
    if dtype == "f32":
        return {}
    out = int(out_dtype == "f32")
    chosen = {1: _gemv(1, cols, out)}
    if cols % MMA_K == 0 and has_tensor_cores(dtype, arch):
        for tiles in MMA_TILES:
            for rows in range(2, tiles * _MMA_TOKENS + 1):
                chosen.setdefault(rows, Skinny("linear_mma", {"VX_TILES": tiles, "VX_OUT": out}))
    else:
        for tile in GEMV_TOKENS:
            for rows in range(2, tile + 1):
                chosen.setdefault(rows, _gemv(tile, cols, out))
    return chosen


def _gemv(tokens: int, cols: int, out: int) -> Skinny:
    options = {"VX_VEC": vector_width(cols), "VX_TOKENS": tokens, "VX_OUT": out}
    return Skinny("linear_gemv", options)
