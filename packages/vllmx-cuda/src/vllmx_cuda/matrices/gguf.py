"""Blocks of GGUF files as they lie in the file.

Few rows of activations become 8-bit codes and meet the blocks in integer dot products, which read
each weight once a tile of tokens; many rows multiply by cuBLASLt with blocks that are dequantised
a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from vllmx_core.weights.part import WeightPart

from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs.gguf import BLOCKS, GEMV_TOKENS, RUN, block_bytes, block_values
from vllmx_cuda.matrices.activations import q8_bytes
from vllmx_cuda.matrices.form import (
    ActivationCodes,
    Gather,
    Launcher,
    Operands,
    ScratchBytes,
    Segment,
    SegmentProduct,
    Target,
)
from vllmx_cuda.matrices.pieces import Piece, row_pieces
from vllmx_cuda.matrices.products import by_pieces, work_bytes

GEMV_ROWS = 32
"""Rows that integer dot products take. A tile of 8 costs about 6.4 instructions a weight, 0.22 ps
on an H100; dequantising, writing and reading a 16-bit copy 1.4 ps: as much as six tiles."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """`vllmx_cuda.matrices.form.Form`: (rows, bytes of a row)."""

    block: int
    """Value of VX_BLOCK."""
    gathers = True

    def num_bytes(self, rows: int, cols: int) -> int:
        return rows * (cols // block_values(self.block)) * block_bytes(self.block)

    def scratch(self, rows: int, cols: int, tokens: int) -> ScratchBytes:
        return q8_bytes(cols, min(tokens, GEMV_ROWS)) | ScratchBytes(
            work=work_bytes(rows, cols, "f32")
        )

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        row_bytes = data.num_bytes // rows

        def fill(buffer: Bytes, begin: int, end: int) -> None:
            piece = part.rows(begin, end)
            np.copyto(buffer, piece.buffers["weight"].data)

        span = data.at(first * row_bytes, part.shape[0] * row_bytes)
        return row_pieces(part.shape[0], span, fill)

    def product(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        """The product of a segment. Activations are not rounded in float32, which is for checks and
        not for speed."""
        dequantise = launcher.variant("gguf_dequantize", VX_BLOCK=self.block)
        row_bytes = self.num_bytes(1, segment.cols)

        def unpack(first: int, rows: int) -> None:
            blocks = segment.data.at(first * row_bytes, rows * row_bytes)
            sizes = {"rows": rows, "width": segment.cols}
            arguments = (blocks, None, launcher.products.work, segment.cols)
            launcher.device.launch(dequantise, sizes, arguments)

        by_cublas = by_pieces(launcher, segment, operands, unpack)
        if launcher.target.dtype == "f32":
            return SegmentProduct(by_cublas)
        out = int(operands.out_dtype == "f32")
        tiles = {
            tokens: launcher.variant("gguf_gemv", VX_BLOCK=self.block, VX_TOKENS=tokens, VX_OUT=out)
            for tokens in GEMV_TOKENS
        }

        def enqueue(m: int) -> None:
            if m > GEMV_ROWS:
                by_cublas(m)
                return
            kernel = tiles[next((t for t in GEMV_TOKENS if t >= m), GEMV_TOKENS[-1])]
            sizes = {"tokens": m, "outputs": segment.rows}
            x, shape = launcher.products, (m, segment.rows, segment.cols, operands.pitch)
            arguments = (x.codes, x.scales, segment.data, operands.bias, operands.y, *shape)
            launcher.device.launch(kernel, sizes, arguments)

        return SegmentProduct(enqueue, ActivationCodes("q8"), lambda m: m <= GEMV_ROWS)

    def gather(self, launcher: Launcher, segment: Segment, y: Memory) -> Gather:
        kernel = launcher.variant("gguf_dequantize", VX_BLOCK=self.block)

        def gather(ids: Memory, count: int) -> None:
            sizes = {"rows": count, "width": segment.cols}
            launcher.device.launch(kernel, sizes, (segment.data, ids, y, segment.cols))

        return gather


@dataclass(frozen=True, slots=True)
class Fp4Blocks(GgufBlocks):
    """e2m1 values with an exponent for each 32, as gpt-oss has them, come into the order of GGUF's
    MXFP4 when they are uploaded: the exponent, then the first 16 values in low and the others in
    high halves of bytes."""

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        row_bytes = data.num_bytes // rows

        def fill(buffer: Bytes, begin: int, end: int) -> None:
            piece = part.rows(begin, end)
            packed = piece.buffers["weight"].data.view(np.uint8).reshape(-1, RUN // 2)
            values = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 2, RUN // 2)
            blocks = buffer.reshape(-1, block_bytes(self.block))
            blocks[:, 0] = piece.buffers["scale"].data.view(np.uint8).reshape(-1)
            blocks[:, 1:] = values[:, 0] | values[:, 1] << 4

        span = data.at(first * row_bytes, part.shape[0] * row_bytes)
        return row_pieces(part.shape[0], span, fill)


def expert_blocks(part: WeightPart, target: Target) -> GgufBlocks | None:
    """The form of a part in blocks for experts; None: it has no blocks that they could hold. In
    float32, which is for checks, always None: integer dot products round activations."""
    if target.dtype == "f32":
        return None
    if part.layout.is_mxfp4:
        return Fp4Blocks(BLOCKS["mxfp4"])
    return gguf(part, target)


def gguf(part: WeightPart, target: Target) -> GgufBlocks | None:
    """A `Kind`."""
    block = BLOCKS.get((part.layout.gguf_type or "").lower())
    return None if block is None else GgufBlocks(block)
