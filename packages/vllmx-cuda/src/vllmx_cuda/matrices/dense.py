"""Rows in the model's dtype: what has no other form is rounded or dequantised to it at load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart, is_plain
from vllmx_core.weights.tensor import f32_to_bf16

from vllmx_cuda.device.memory import ITEM_BYTES, Bytes, Memory
from vllmx_cuda.kernel_specs import has_tensor_cores, vector_width
from vllmx_cuda.kernel_specs.linear import (
    GEMV_TOKENS,
    MMA_K,
    MMA_OUTPUTS,
    MMA_TILES,
    MMA_TOKENS,
    SPLIT_BLOCKS,
    row_tiles,
    splits,
)
from vllmx_cuda.kernel_specs.types import ceil_div
from vllmx_cuda.matrices.form import (
    Gather,
    Launcher,
    Operands,
    ScratchBytes,
    Segment,
    SegmentProduct,
    Target,
)
from vllmx_cuda.matrices.pieces import Piece, row_pieces
from vllmx_cuda.matrices.products import multiply_dense

_SPLIT_BYTES = 4 * 8 * MMA_TOKENS * SPLIT_BLOCKS
"""A block has sums of 8 outputs for each token."""


@dataclass(frozen=True, slots=True)
class Dense:
    """`vllmx_cuda.matrices.form.Form`: (rows, cols) values."""

    dtype: str
    offset: float = 0.0
    """Added to each value at load."""
    gathers = True

    def num_bytes(self, rows: int, cols: int) -> int:
        return rows * cols * ITEM_BYTES[self.dtype]

    def scratch(self, rows: int, cols: int, tokens: int) -> ScratchBytes:
        """Sums and counters of blocks that share a product of few tokens."""
        return ScratchBytes(work=_SPLIT_BYTES, counters=4 * SPLIT_BLOCKS)

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        row_bytes = data.num_bytes // rows
        span = data.at(first * row_bytes, part.shape[0] * row_bytes)
        return dense_pieces(part, span, self.dtype, self.offset)

    def product(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        """Own kernels for few rows."""
        n, k, scratch = segment.rows, segment.cols, launcher.products
        processors = launcher.device.info.num_processors
        chosen = skinny_kernels(
            self.dtype, n, k, operands.out_dtype, launcher.target.arch, processors
        )
        by_mma = bool(chosen) and chosen[1].splits > 0
        if by_mma:
            options = operands.options | ({"VX_ROWS": 2} if operands.gate else {})
            chosen = {m: replace(c, options={**c.options, **options}) for m, c in chosen.items()}
        outputs = n // 2 if operands.gate else n
        kernels = {m: launcher.variant(c.entry, **c.options) for m, c in chosen.items()}

        def enqueue(m: int) -> None:
            kernel = kernels.get(m)
            if kernel is None:
                multiply_dense(launcher.device, m, n, k, self.dtype, segment.data, operands)
                return
            parts, sizes = chosen[m].splits, {"tokens": m, "outputs": outputs}
            shared: tuple[Memory | None, ...] = ()
            if parts:
                sizes |= {"width": k, "splits": parts}
                shared = (scratch.work, scratch.counters) if parts > 1 else (None, None)
            arguments = (
                operands.x,
                segment.data,
                operands.bias,
                operands.y,
                *shared,
                m,
                outputs,
                k,
                operands.pitch,
                *(operands.fused() if parts else ()),
            )
            launcher.device.launch(kernel, sizes, arguments)

        blocks = ceil_div(n, MMA_OUTPUTS * row_tiles(n, processors))
        gates = by_mma and chosen[1].splits == 1
        return SegmentProduct(enqueue, blocks=blocks if by_mma else None, gates=gates)

    def gather(self, launcher: Launcher, segment: Segment, y: Memory) -> Gather:
        kernel = launcher.variant("gather_rows", VX_VEC=vector_width(segment.cols))

        def gather(ids: Memory, count: int) -> None:
            sizes = {"rows": count, "width": segment.cols}
            launcher.device.launch(kernel, sizes, (ids, segment.data, y, segment.cols))

        return gather


def dense(part: WeightPart, target: Target) -> Dense:
    """A `Kind` that takes everything."""
    return Dense(target.dtype)


def dense_pieces(part: WeightPart, target: Memory, dtype: str, offset: float) -> Iterator[Piece]:
    """A tensor as `dtype`: its bytes as they are where the file holds that; else rounded to it,
    from float32."""
    raw = part.stored().buffers["weight"] if is_plain(part) and not offset else None
    as_stored = raw if raw is not None and raw.dtype == dtype else None

    def fill(buffer: Bytes, begin: int, end: int) -> None:
        if as_stored is not None:
            np.copyto(buffer, as_stored.rows(begin, end).data)
        else:
            values = part.dequantize(begin, end).reshape(-1)
            buffer[...] = _rounded(values + np.float32(offset) if offset else values, dtype)

    return row_pieces(part.shape[0], target, fill)


def _rounded(values: F32, dtype: str) -> Bytes:
    if dtype == "bf16":
        return f32_to_bf16(values).view(np.uint8)
    with np.errstate(over="ignore"):  # beyond float16: infinity, as the checkpoint's maker chose
        kind = np.float16 if dtype == "f16" else np.float32
        return np.ascontiguousarray(values, kind).view(np.uint8)


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
    """Number of tokens -> kernel for a matrix (rows, cols). Own kernels read the weights of a few
    rows once, at the speed of memory, where cuBLASLt is made for many rows; the choice is by size
    until measurements say better. cuBLASLt takes the numbers that are missing, and float32, which
    is for checks and not for speed. Tensor cores where columns and
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
