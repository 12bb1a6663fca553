"""Chooses the kernel that multiplies a few rows: own ones read the weights once, at the speed of
memory, where cuBLASLt is made for many rows. The choice is by size until measurements say better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllmx_cuda.kernel_specs import has_tensor_cores, vector_width
from vllmx_cuda.kernel_specs.linear import (
    GEMV_TOKENS,
    MMA_K,
    MMA_TILES,
    MMA_TOKENS,
    row_tiles,
    splits,
)


@dataclass(frozen=True, slots=True)
class Skinny:
    """An entry of `KERNELS` with its options, but for the dtype."""

    entry: str
    options: Mapping[str, int]
    splits: int = 0
    """The number of blocks among which its columns are split; 0: it knows none."""


def skinny_kernels(
    dtype: str, rows: int, cols: int, out_dtype: str, arch: int, num_processors: int
) -> dict[int, Skinny]:
    """Number of tokens -> kernel for a matrix (rows, cols); cuBLASLt takes the numbers that are
    missing, and float32, which is for checks and not for speed. Tensor cores where columns and
    `arch`, as 75 or 90, allow it: from one token on, so that its bits do not depend on others."""
    if dtype == "f32":
        return {}
    out = int(out_dtype == "f32")
    if cols % MMA_K == 0 and has_tensor_cores(dtype, arch):
        tiles, parts = row_tiles(rows, num_processors), splits(rows, cols, num_processors)
        kernels = [
            Skinny("linear_mma", {"VX_TILES": n, "VX_ROWS": tiles, "VX_OUT": out}, parts)
            for n in MMA_TILES
        ]
        token_tile = MMA_TOKENS // MMA_TILES[-1]
        return {m: kernels[(m - 1) // token_tile] for m in range(1, MMA_TOKENS + 1)}
    chosen: dict[int, Skinny] = {}
    for tile in GEMV_TOKENS:
        options = {"VX_VEC": vector_width(cols), "VX_TOKENS": tile, "VX_OUT": out}
        for m in range(1, tile + 1):
            chosen.setdefault(m, Skinny("linear_gemv", options))
    return chosen
