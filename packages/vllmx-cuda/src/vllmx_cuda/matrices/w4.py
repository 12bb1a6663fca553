"""Integers of 4, 6 or 8 bits with 16-bit activations, in the order of tensor-core fragments: GPTQ,
AWQ, packed integers of compressed-tensors, blocks of GGUF with such codes.

Up to `OWN_TOKENS` rows meet the integers on tensor cores, which read each of them once for 64 rows.
More rows, float32, and bf16 on GPUs before sm_80 multiply by cuBLASLt with rows that are
dequantised a piece at a time. Where input features are not in the order of their groups (GPTQ's
desc_act), the columns are, and the activations are brought into their order first; where groups
are uneven besides, columns that meet activations of 0 fill them up to multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from vllmx_core.errors import VllmxError
from vllmx_core.weights.part import WeightPart

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Bytes, Memory
from vllmx_cuda.kernel_specs import Variant, has_tensor_cores
from vllmx_cuda.kernel_specs.types import ceil_div
from vllmx_cuda.kernel_specs.w4 import (
    TILE_ROWS,
    folds,
    row_tiles,
    token_tiles,
)
from vllmx_cuda.matrices.form import (
    Gather,
    Launcher,
    Operands,
    ScratchBytes,
    Segment,
    SegmentProduct,
    Target,
)
from vllmx_cuda.matrices.pieces import Piece, Stored, row_pieces, runs_of_rows
from vllmx_cuda.matrices.products import by_pieces, work_bytes
from vllmx_cuda.matrices.split import OWN_TOKENS, counter_bytes, split_product
from vllmx_cuda.matrices.w4_gguf import stored_blocks
from vllmx_cuda.matrices.w4_packing import Packing, packed_rows, packing_of
from vllmx_cuda.matrices.w4_words import stored_words

_ROWS_AT_ONCE = 16 * TILE_ROWS
"""Rows that are unpacked together: what they take meanwhile stays in a cache."""


@dataclass(frozen=True, slots=True)
class W4:
    """`vllmx_cuda.matrices.form.Form`: row tiles as in `kernels/w4_codes.h`, then zeroed counters
    for blocks that share a product, then the order of the columns."""

    packing: Packing
    dtype: str
    """The type of the activations."""

    @property
    def gathers(self) -> bool:
        """True if single rows can be gathered; not with columns in an order of their own."""
        return not self.packing.order

    def num_bytes(self, rows: int, cols: int) -> int:
        return self._tail(rows, cols) + counter_bytes(rows) + len(self.packing.order)

    def _tail(self, rows: int, cols: int) -> int:
        """The byte at which the tiles end."""
        return ceil_div(rows, TILE_ROWS) * self.packing.row_tile_bytes(cols)

    def scratch(self, rows: int, cols: int, tokens: int) -> ScratchBytes:
        """Dequantised rows or sums of blocks that share a product, then activations in the order of
        the columns."""
        width = self.packing.width(cols)
        ordered = tokens * width * ITEM_BYTES[self.dtype] if self.packing.order else 0
        return ScratchBytes(work=work_bytes(rows, width, self.dtype) + ordered)

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        (count, cols), size = part.shape, self.packing.row_tile_bytes(part.shape[1])
        if first == 0:  # first, for the kernels that put columns into this order
            yield self._tail_piece(data, rows, cols)
        span = data.at(first // TILE_ROWS * size, count // TILE_ROWS * size)
        order = self._columns(data, rows, cols) if self.packing.order else None
        stored = stored_blocks(part) or stored_words(part, self.packing, order)
        if stored is not None:
            yield from stored_pieces(stored, count, span)
        else:
            yield from row_pieces(count // TILE_ROWS, span, partial(self._fill, part))

    def _tail_piece(self, data: Memory, rows: int, cols: int) -> Piece:
        order = np.frombuffer(self.packing.order, np.uint8)
        tail = np.concatenate([np.zeros(counter_bytes(rows), np.uint8), order])
        target = data.at(self._tail(rows, cols), tail.nbytes)
        return Piece(target, lambda buffer: np.copyto(buffer, tail))

    def _columns(self, data: Memory, rows: int, cols: int) -> Memory:
        """The input feature of each column, int32."""
        return data.at(self._tail(rows, cols) + counter_bytes(rows), len(self.packing.order))

    def _fill(self, part: WeightPart, buffer: Bytes, begin: int, end: int) -> None:
        """Rows of tiles in their order, which the host makes."""
        tiles = buffer.reshape(end - begin, -1)
        for row in range(begin * TILE_ROWS, end * TILE_ROWS, _ROWS_AT_ONCE):
            last = min(row + _ROWS_AT_ONCE, end * TILE_ROWS)
            some = packed_rows(part, self.packing, row, last)
            at = row // TILE_ROWS - begin
            tiles[at : at + len(some)] = some

    def product(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        order, operands = self._ordered(launcher, segment, operands)
        segment = replace(segment, cols=self.packing.width(segment.cols))
        by_cublas = by_pieces(launcher, segment, operands, self._dequantise(launcher, segment))
        if not has_tensor_cores(self.dtype, launcher.target.arch):
            own, most = SegmentProduct(by_cublas), 0
        else:
            own, most = self._own(launcher, segment, operands), OWN_TOKENS

        def enqueue(m: int) -> None:
            order(m)
            if m <= most:
                own.enqueue(m)
            else:
                by_cublas(m)

        if self.packing.order:  # a norm's weights are not in it
            return SegmentProduct(enqueue)
        return replace(own, enqueue=enqueue)

    def _ordered(
        self, launcher: Launcher, segment: Segment, operands: Operands
    ) -> tuple[Callable[[int], None], Operands]:
        """The launch that brings x into the order of the columns, and the operands afterwards."""
        if not self.packing.order:
            return lambda m: None, operands
        kernel, x, cols = launcher.variant("gather_columns", VX_VEC=1), operands.x, segment.cols
        columns, width = self._columns(segment.data, segment.rows, cols), self.packing.width(cols)
        ordered = launcher.products.work.at(work_bytes(segment.rows, width, self.dtype))

        def order(m: int) -> None:
            arguments = (x, columns, ordered, width, cols)
            launcher.device.launch(kernel, {"rows": m, "width": width}, arguments)

        return order, replace(operands, x=ordered)

    def _dequantise(self, launcher: Launcher, segment: Segment) -> Callable[[int, int], None]:
        kernel = launcher.variant("w4_dequantize", **self.packing.options)
        cols, size = segment.cols, self.packing.row_tile_bytes(segment.cols)

        def dequantise(first: int, rows: int) -> None:
            tiles = segment.data.at(first // TILE_ROWS * size, ceil_div(rows, TILE_ROWS) * size)
            shape = (rows, cols, self.packing.group_shift)
            sizes = {"outputs": rows, "width": cols}
            launcher.device.launch(kernel, sizes, (tiles, launcher.products.work, *shape))

        return dequantise

    def _own(self, launcher: Launcher, segment: Segment, operands: Operands) -> SegmentProduct:
        n, out = segment.rows, int(operands.out_dtype == "f32")
        counters = segment.data.at(self._tail(n, segment.cols), counter_bytes(n))
        in_tile = folds(self.packing.group_shift)

        def variant(tokens: int) -> Variant:
            tiles = token_tiles(tokens, self.packing.zero, in_tile, launcher.target.arch)
            return launcher.variant(
                "w4_linear",
                VX_TILES=tiles,
                VX_ROWS=2 if operands.gate else row_tiles(tokens),
                VX_FOLDS=in_tile,
                VX_OUT=out,
                **operands.options,
                **self.packing.options,
            )

        layout = (self.packing.group_shift,)
        return split_product(
            launcher, segment, operands, counters, variant, (segment.data,), layout
        )

    def gather(self, launcher: Launcher, segment: Segment, y: Memory) -> Gather:
        kernel = launcher.variant("w4_gather", **self.packing.options)
        shape = (segment.cols, self.packing.group_shift)

        def gather(ids: Memory, count: int) -> None:
            sizes = {"rows": count, "width": segment.cols}
            launcher.device.launch(kernel, sizes, (segment.data, ids, y, *shape))

        return gather


def w4(part: WeightPart, target: Target) -> W4 | None:
    """A `Kind`. GGUF's blocks have kernels of their own, which those GPUs and float32 are left to
    that have no tensor cores for this."""
    if part.layout.gguf_type is not None and not has_tensor_cores(target.dtype, target.arch):
        return None
    packing = packing_of(part)
    return None if packing is None else W4(packing, target.dtype)


class StoredRows(Protocol):
    """A part, and what the kernel wants of it."""

    @property
    def tile_bytes(self) -> int:
        """Stored bytes of 16 rows."""
        ...

    @property
    def kernel(self) -> Variant: ...

    def fill(self, begin: int, end: int, buffer: Bytes) -> None:
        """Copies these rows as they are."""
        ...

    def launch(
        self, tiles: Memory, rows: int, device: Device, stored: Memory, fault: Memory
    ) -> None:
        """Enqueues the product of so many rows; see `Stored.launch`."""
        ...

    def refusal(self, fault: int) -> VllmxError: ...


def stored_pieces(part: StoredRows, rows: int, tiles: Memory) -> Iterator[Piece]:
    """Uploads of all `rows` rows of a part, which become `tiles`."""
    count = rows // TILE_ROWS
    for first, last, span in runs_of_rows(count, tiles, count * part.tile_bytes):
        begin, end = first * TILE_ROWS, last * TILE_ROWS
        launch = partial(part.launch, span, end - begin)
        stored = Stored((last - first) * part.tile_bytes, part.kernel, launch, part.refusal)
        yield Piece(span, partial(part.fill, begin, end), stored=stored)
