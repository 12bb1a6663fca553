"""Products of rows with their experts' matrices, by tiles: one kernel for each form of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Variant, vector_width
from vllmx_cuda.kernel_specs.experts import CODED_TILES
from vllmx_cuda.kernel_specs.linear import MMA_TILES, row_tiles
from vllmx_cuda.kernel_specs.types import PLAIN, ceil_div
from vllmx_cuda.kernel_specs.w4 import ROW_TILES, TILE_ROWS, folds
from vllmx_cuda.matrices.codes8 import Codes8
from vllmx_cuda.matrices.gguf import GgufBlocks
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.matrices.w4 import W4
from vllmx_cuda.program.lowering import Lowering

GEMV_TILE = 4
_TOKENS_A_TILE = 8
"""The tokens of products on tensor cores, in each of their tiles."""


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times the matrices of their experts."""

    kernels: Mapping[int, Variant]
    """The kernel for each number of positions in a tile."""
    weights: tuple[Memory, ...]
    bias: Memory | None
    share: int
    """Slots of a token."""
    rows: int
    cols: int
    layout: tuple[int, ...] = ()
    """Further arguments."""
    by_width: bool = True
    """True if a launch depends on the columns."""

    def launch(
        self,
        device: Device,
        tile: int,
        num_tiles: int,
        x: Memory,
        rows_of_x: int,
        order: Memory | None,
        tiles: Memory,
        y: Memory,
    ) -> None:
        """x by tokens, or by positions without `order`; y by positions."""
        shape = {"outputs": self.rows, "tiles": num_tiles}
        shape |= {"width": self.cols} if self.by_width else {}
        operands = (x, *self.weights, self.bias, order, tiles, y, self.share, self.rows, self.cols)
        device.launch(self.kernels[tile], shape, (*operands, *self.layout))


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """The same where the matrices are GGUF blocks, as they are stored: rows become codes first."""

    quantise: Variant
    kernels: Mapping[int, Variant]
    codes: Memory
    scales: Memory
    weights: Memory
    bias: Memory | None
    share: int
    rows: int
    cols: int

    def launch(
        self,
        device: Device,
        tile: int,
        num_tiles: int,
        x: Memory,
        rows_of_x: int,
        order: Memory | None,
        tiles: Memory,
        y: Memory,
    ) -> None:
        """Enqueues the product, see `Product.launch`."""
        coded, shape = (self.codes, self.scales), {"rows": rows_of_x, "width": self.cols}
        device.launch(self.quantise, shape, (x, *coded, self.cols))
        operands = (*coded, self.weights, self.bias, order, tiles, y)
        shape = {"outputs": self.rows, "tiles": num_tiles}
        device.launch(self.kernels[tile], shape, (*operands, self.share, self.rows, self.cols))


def expert_product(
    to: Lowering,
    stack: Matrix,
    rows: int,
    out_dtype: str,
    share: int,
    coded: tuple[Memory, Memory],
    *,
    mma: bool,
) -> Product | BlockProduct:
    """The product of a stack of matrices with so many rows each.

    Args:
        share: slots of a token.
        coded: room for rows as codes of 8 bits, and for their scales.
        mma: whether both stacks of the experts have sizes for tensor cores.
    """
    (segment,), out = stack.segments, int(out_dtype == "f32")
    form, shape = segment.form, (stack.bias, share, rows, stack.cols)
    if isinstance(form, W4):
        shift = form.packing.group_shift
        more = {**form.packing.options, "VX_FOLDS": folds(shift), "VX_OUT": out, **PLAIN}
        kernels = _coded_kernels(to, "experts_w4", rows, share, more)
        return Product(kernels, (segment.data,), *shape, (shift,))
    if isinstance(form, Codes8):
        kernels = _coded_kernels(to, "experts_codes8", rows, share, {"VX_OUT": out, **PLAIN})
        weights = segment.data, form.scales(segment)
        return Product(kernels, weights, *shape, (form.block_rows, form.group_shift(stack.cols)))
    if isinstance(form, GgufBlocks):
        tile = _TOKENS_A_TILE if mma else GEMV_TILE
        options = {"VX_BLOCK": form.block, "VX_TOKENS": tile, "VX_OUT": out}
        quantise, kernel = to.variant("quantize_q8"), to.variant("experts_gguf", **options)
        codes, scales = coded
        return BlockProduct(quantise, {tile: kernel}, codes, scales, segment.data, *shape)
    if mma:
        tall = row_tiles(rows, to.device.info.num_processors)
        kernels = {
            _TOKENS_A_TILE * n: to.variant("experts_mma", VX_TILES=n, VX_ROWS=tall, VX_OUT=out)
            for n in MMA_TILES
        }
        return Product(kernels, (segment.data,), *shape)
    options = {"VX_VEC": vector_width(stack.cols), "VX_TOKENS": GEMV_TILE, "VX_OUT": out}
    kernels = {GEMV_TILE: to.variant("experts_gemv", **options)}
    return Product(kernels, (segment.data,), *shape, by_width=False)


def _coded_kernels(
    to: Lowering, entry: str, rows: int, share: int, options: Mapping[str, int]
) -> Mapping[int, Variant]:
    """Two tiles of rows a block, where that leaves each processor one in a step of one token."""
    most = ROW_TILES[-1]
    blocks = ceil_div(rows, most * TILE_ROWS) * share
    tall = most if blocks > to.device.info.num_processors else 1
    return {
        _TOKENS_A_TILE * n: to.variant(entry, VX_TILES=n, VX_ROWS=tall, **options)
        for n in CODED_TILES
    }
