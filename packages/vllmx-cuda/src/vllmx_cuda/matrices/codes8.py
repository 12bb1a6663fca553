"""Rows of 8-bit codes, int8 or FP8 e4m3, with scales of rows or of blocks.

Few rows of activations stay as they are and meet codes that are made floats in registers: FP8 on
tensor cores of any kind, for its codes are bf16 and f16 as well. Many become codes themselves,
where the checkpoint was made for that, the scales are those of rows or (FP8) of 128 x 128 blocks,
and the device has a product for such codes; else the weights are dequantised a piece at a time.
Each row of activations has its own scale, or for FP8 the one that the checkpoint fixes; with blocks
one for each 128 columns. (int8 has no exponents: its rows have their own in any case, which is
finer.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor, float8_to_f32

from vllmx_cuda.device.buckets import measured_rows
from vllmx_cuda.device.device import Product
from vllmx_cuda.device.memory import ITEM_BYTES, Bytes, Memory
from vllmx_cuda.kernel_specs import Variant, has_tensor_cores
from vllmx_cuda.kernel_specs.codes8 import CODES, GEMV_TOKENS, GROUP, MMA_COLS, STEP
from vllmx_cuda.kernel_specs.types import ceil_div
from vllmx_cuda.kernel_specs.w4 import ONE_GROUP, ZERO_MIDDLE, row_tiles, token_tiles
from vllmx_cuda.matrices import pieces
from vllmx_cuda.matrices.activations import groups_bytes, rows_bytes
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
from vllmx_cuda.matrices.fp8_blocks import X_CODES, BlockProduct
from vllmx_cuda.matrices.pieces import Piece
from vllmx_cuda.matrices.products import WORK_BYTES, by_pieces, columns, work_bytes
from vllmx_cuda.matrices.split import OWN_TOKENS, counter_bytes, split_product

FEW_ROWS = 4
"""Rows from which on products of codes are worth it: one tile of `GEMV_TOKENS`."""
FEW_MMA_ROWS = 32
"""The same where tensor cores take the few: as long as those limit no GPU more than its memory."""
FEW_PLAIN_ROWS = 32
"""Rows from which on weights are dequantised that tensor cores do not take: as long as the tiles'
passes over the codes cost less than writing and reading them with 16 bits."""
_ROWS = 256
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Codes8:
    """`vllmx_cuda.matrices.form.Form`: (rows, cols) codes, the scales as float32, then zeroed
    counters for blocks that share a product."""

    code: str
    """A key of `CODES`."""
    block_rows: int
    block_cols: int
    """The number of columns that share one scale."""
    coded_products: bool
    """True if activations become codes as well."""
    x_scale: float = 0.0
    """The scale of such activations, as the checkpoint fixes it; 0: each row has its own."""
    alone: str = ""
    """Tells a part that cannot share blocks of rows with its neighbours from them."""
    gathers = False

    def num_bytes(self, rows: int, cols: int) -> int:
        return self._counters_at(rows, cols) + counter_bytes(rows)

    def _counters_at(self, rows: int, cols: int) -> int:
        return self._scales_at(rows, cols) + 4 * self._num_scales(rows, cols)

    def _scales_at(self, rows: int, cols: int) -> int:
        return ceil_div(rows * cols, _ALIGNMENT) * _ALIGNMENT

    def _num_scales(self, rows: int, cols: int) -> int:
        return ceil_div(rows, self.block_rows) * self._scales_pitch(cols)

    def _scales_pitch(self, cols: int) -> int:
        """The distance between rows of scales, which `kernels/code_scale.h` computes alike."""
        groups = ceil_div(cols, self.block_cols)
        return ceil_div(groups, 4) * 4 if self.block_rows > 1 else groups

    def scratch(self, rows: int, cols: int, tokens: int) -> ScratchBytes:
        need = ScratchBytes(work=work_bytes(rows, cols, "f32"))
        if self.coded_products and self.block_rows == GROUP:
            return need | groups_bytes(cols, tokens)
        if self.coded_products:
            sums = min(4 * rows * tokens, max(WORK_BYTES, 4 * _ROWS * tokens))
            need |= rows_bytes(cols, tokens) | ScratchBytes(work=sums)
        return need

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        """Whole blocks of rows, codes and scales at once: those of a part that is made are made
        together."""
        cols, count = part.shape[1], part.shape[0]
        groups, at = self._scales_pitch(cols), self._scales_at(rows, cols)
        height = self.block_rows
        # With the scales: CuPy rounds pinned buffers up to a power of two.
        most = max(1, pieces.PIECE_BYTES // (cols * height + 4 * groups)) * height
        for begin in range(0, count, most):
            end = min(count, begin + most)
            codes = data.at((first + begin) * cols, (end - begin) * cols)
            block = (first + begin) // height
            scales = data.at(
                at + 4 * block * groups, 4 * groups * (ceil_div(first + end, height) - block)
            )

            def fill(buffer: Bytes, begin: int = begin, end: int = end) -> None:
                split = (end - begin) * cols
                self._fill(part, begin, end, buffer[:split], buffer[split:])

            yield Piece(codes, fill, (scales,))
        if first == 0:
            counters = data.at(self._counters_at(rows, cols), counter_bytes(rows))
            yield Piece(counters, lambda buffer: buffer.fill(0))

    def _fill(self, part: WeightPart, begin: int, end: int, codes: Bytes, scales: Bytes) -> None:
        by_blocks = part.layout.options["strategy"] == "block"
        if by_blocks and isinstance(part, StoredPart):
            raw, scale = part.buffers["weight"].rows(begin, end), part.buffers["scale"]
            first, last = begin // self.block_rows, ceil_div(end, self.block_rows)
        else:
            piece = part.rows(begin, end)
            raw, scale = piece.buffers["weight"], piece.buffers["scale"]
            first, last = 0, ceil_div(end - begin, self.block_rows)
        np.copyto(codes, raw.data)
        values = _scale_values(scale.in_memory())
        if by_blocks:
            values = values[first:last]
        else:
            groups = ceil_div(part.shape[1], self.block_cols)
            values = np.broadcast_to(values.reshape(-1, groups), (end - begin, groups))
        values = np.ascontiguousarray(values, np.float32)
        if self.code == "f8e4m3":
            values = self._with_nan(values, codes.reshape(end - begin, -1))
        target = scales.view(np.float32).reshape(len(values), -1)
        target[:, : values.shape[1]] = values
        target[:, values.shape[1] :] = 0

    def _with_nan(self, scales: F32, codes: Bytes) -> F32:
        """Tensor cores that take codes for numbers of 16 bits know no NaN among them: its scale is
        one, so that the sums are."""
        lost = (codes & 0x7F) == 0x7F
        if not lost.any():
            return scales
        scales = scales.copy()
        row, column = np.nonzero(lost)
        scales[row // self.block_rows, column // self.block_cols] = np.nan
        return scales

    def scales(self, segment: Segment) -> Memory:
        return segment.data.at(self._scales_at(segment.rows, segment.cols))

    def group_shift(self, cols: int) -> int:
        """The shift by which codes8_mma finds the scale of a column."""
        return ONE_GROUP if self.block_cols >= cols else self.block_cols.bit_length() - 1

    def product(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        rows, cols = segment.rows, segment.cols
        codes, at = segment.data, self._scales_at(rows, cols)
        scales, blocks = segment.data.at(at), (self.block_rows, self.block_cols)
        options = {"VX_CODE": CODES[self.code], "VX_OUT": int(operands.out_dtype == "f32")}
        dequantise = launcher.variant("codes8_dequantize", VX_TOKENS=1, **options)

        def unpack(first: int, count: int) -> None:
            part = codes.at(first * cols, count * cols)
            sizes = {"rows": count, "width": cols}
            arguments = (part, scales, launcher.products.work, cols, first, *blocks)
            launcher.device.launch(dequantise, sizes, arguments)

        by_values = by_pieces(launcher, segment, operands, unpack)
        in_blocks = self.coded_products and self.block_rows == GROUP
        by_blocks = BlockProduct(launcher, segment, operands, scales) if in_blocks else None
        by_codes = by_blocks.lowered() if by_blocks else self._coded(launcher, segment, operands)

        @cache
        def coded(m: int) -> bool:
            if by_blocks is not None:
                return by_blocks.exists(m)
            return self.coded_products and all(
                map(launcher.device.can_multiply, self._cut(m, segment))
            )

        usually = coded(FEW_ROWS + 1)
        if self.meets_tensor_cores(cols, launcher.target):
            as_they_are = self._by_mma(launcher, segment, operands)
            library = usually and not (by_blocks and by_blocks.is_own)
            few = FEW_MMA_ROWS if library else OWN_TOKENS
        else:
            as_they_are = SegmentProduct(self._by_gemv(launcher, segment, operands))
            few = FEW_ROWS if usually else FEW_PLAIN_ROWS

        def enqueue(m: int) -> None:
            if m <= few:
                as_they_are.enqueue(m)
            elif usually and coded(m):
                by_codes(m)
            else:
                by_values(m)

        of_x = X_CODES if in_blocks else ActivationCodes(self.code, self.x_scale)
        return replace(
            as_they_are,
            enqueue=enqueue,
            codes=of_x if usually else None,
            wants_codes=lambda m: m > few and coded(m),
        )

    def meets_tensor_cores(self, cols: int, target: Target) -> bool:
        """codes8_mma has no other codes, and groups of columns that are whole tiles of its."""
        whole = self.block_cols >= cols or (
            self.block_cols % MMA_COLS == 0 and self.block_cols.bit_count() == 1
        )
        return self.code == "f8e4m3" and whole and has_tensor_cores(target.dtype, target.arch)

    def _by_mma(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        rows, cols, out = segment.rows, segment.cols, int(operands.out_dtype == "f32")
        scales, shift = self.scales(segment), self.group_shift(cols)
        counters = segment.data.at(self._counters_at(rows, cols))

        def variant(tokens: int) -> Variant:
            tiles = token_tiles(tokens, ZERO_MIDDLE, 1, launcher.target.arch)
            rows = 2 if operands.gate else row_tiles(tokens)
            options = {"VX_TILES": tiles, "VX_ROWS": rows, "VX_OUT": out}
            return launcher.variant("codes8_mma", **options, **operands.options)

        matrix, layout = (segment.data, scales), (self.block_rows, shift)
        return split_product(launcher, segment, operands, counters, variant, matrix, layout)

    def _by_gemv(
        self, launcher: Launcher, segment: Segment, operands: Operands
    ) -> Callable[[int], None]:
        rows, cols, code = segment.rows, segment.cols, CODES[self.code]
        scales, out = segment.data.at(self._scales_at(rows, cols)), int(operands.out_dtype == "f32")
        tiles = {
            t: launcher.variant("codes8_gemv", VX_TOKENS=t, VX_CODE=code, VX_OUT=out)
            for t in GEMV_TOKENS
        }

        def multiply(m: int) -> None:
            kernel = tiles[next((t for t in GEMV_TOKENS if t >= m), GEMV_TOKENS[-1])]
            shape = (m, rows, cols, operands.pitch, self.block_rows, self.block_cols)
            arguments = (operands.x, segment.data, scales, operands.bias, operands.y, *shape)
            launcher.device.launch(kernel, {"tokens": m, "outputs": rows}, arguments)

        return multiply

    def _cut(self, m: int, segment: Segment) -> list[Product]:
        """The product of codes, some columns at a time, for the sums have 32 bits; as many for all
        numbers of rows that share an algorithm."""
        most = measured_rows(m)
        rows, step = segment.rows, max(1, WORK_BYTES // (4 * most * _ROWS)) * _ROWS
        sums = "i32" if self.code == "i8" else "f32"
        counts = (min(step, rows - first) for first in range(0, rows, step))
        return [Product(m, count, segment.cols, self.code, sums) for count in counts]

    def _coded(
        self, launcher: Launcher, segment: Segment, operands: Operands
    ) -> Callable[[int], None]:
        """Products of codes by cuBLASLt into sums, which are scaled afterwards."""
        rows, cols, out_dtype = segment.rows, segment.cols, operands.out_dtype
        codes, scales = segment.data, segment.data.at(self._scales_at(rows, cols))
        rescale = launcher.variant(
            "codes8_rescale", VX_CODE=CODES[self.code], VX_TOKENS=1, VX_OUT=int(out_dtype == "f32")
        )

        def multiply(m: int) -> None:
            scratch, first = launcher.products, 0
            for product in self._cut(m, segment):
                count = product.n
                part = columns(operands, first, count, ITEM_BYTES[out_dtype])
                w = codes.at(first * cols, count * cols)
                launcher.device.multiply(product, scratch.codes, w, scratch.work)
                w_scales = scales.at(4 * first, 4 * count)
                arguments = (
                    scratch.work,
                    scratch.scales,
                    w_scales,
                    part.bias,
                    part.y,
                    count,
                    operands.pitch,
                )
                launcher.device.launch(rescale, {"tokens": m, "outputs": count}, arguments)
                first += count

        return multiply

    def gather(self, launcher: Launcher, segment: Segment, y: Memory) -> Gather:
        raise AssertionError("no embedding is held as codes of 8 bits")


def codes8(part: WeightPart, target: Target) -> Codes8 | None:
    """A `Kind`: "int8" without zero points, for activations as codes; "fp8" of e4m3."""
    options = part.layout.options
    for_codes = options.get("activations", "none") != "none"
    if part.layout.kind == "int8":  # with plain activations: a matter for `w4`
        code, plain = "i8", for_codes and options.get("symmetric") is True
    elif part.layout.kind == "fp8":
        code, plain = "f8e4m3", options.get("dtype") == "f8e4m3"
    else:
        return None
    cols = part.shape[1]
    block_rows, block_cols = 1, min(cols, part.layout.group_size or cols)
    if options["strategy"] == "block":
        block_rows, block_cols = int(options["block_rows"]), min(cols, int(options["block_cols"]))
    if not plain or cols % STEP or block_cols % STEP:
        return None
    # in float32, which is for checks and not for speed, activations are not rounded
    shapes = [(1, cols)] + [(GROUP, GROUP)] * (code == "f8e4m3")
    coded = for_codes and target.dtype != "f32" and (block_rows, block_cols) in shapes
    alone = part.name if part.shape[0] % block_rows else ""
    x_scale = _fixed_scale(part) if coded and code == "f8e4m3" else 0.0
    return Codes8(code, block_rows, block_cols, coded, x_scale, alone)


def _fixed_scale(part: WeightPart) -> float:
    """0 where a checkpoint has none, or one that nobody calibrated."""
    if part.layout.options.get("activations") != "static":
        return 0.0
    raw = part.rows(0, 1).buffers.get("input_scale")
    if raw is None:
        return 0.0
    value = float(raw.to_f32().reshape(-1)[0])
    return value if 0 < value < float("inf") else 0.0


def _scale_values(raw: RawTensor) -> F32:
    """Scales in a file may be exponents."""
    if raw.dtype == "u8":
        return float8_to_f32(np.asarray(raw.view(), np.uint8), "f8e8m0")
    return raw.to_f32()
