"""Products of few tokens by kernels whose blocks may share the columns of an output
(`store_fragments` in `kernels/outputs.h`)."""

from __future__ import annotations

from collections.abc import Callable

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.types import FUSED_TOKENS, ceil_div
from vllmx_cuda.kernel_specs.w4 import TILE_ROWS, TILES, TOKENS, arrival_count, splits
from vllmx_cuda.matrices.form import Launcher, Operands, Segment, SegmentProduct
from vllmx_cuda.matrices.products import work_bytes

OWN_TOKENS = 2 * TOKENS
"""Rows that such a kernel takes at most, `TOKENS` in a pass. A pass costs about 0.2 ps a weight on
an H100, by its arithmetic; dequantising, writing and reading a 16-bit copy 1.4 ps."""


def counter_bytes(rows: int) -> int:
    """Bytes of the counters, zeros, that a segment of so many rows needs."""
    return 4 * arrival_count(OWN_TOKENS, rows)


def split_product(
    launcher: Launcher,
    segment: Segment,
    operands: Operands,
    counters: Memory,
    variant: Callable[[int], Variant],
    matrix: tuple[Memory, ...],
    layout: tuple[int, ...],
) -> SegmentProduct:
    """The product for at most `OWN_TOKENS` rows.

    Args:
        variant: the kernel for so many tokens.
        matrix, layout: its arguments before the bias and after the pitch.
    """
    n, k = segment.rows, segment.cols
    outputs = n // 2 if operands.gate else n
    parts = splits(n, k, launcher.device.info.num_processors)
    sums = parts * OWN_TOKENS * n * 4 if parts > 1 else 0
    assert sums <= work_bytes(n, k, launcher.target.dtype), (n, k, parts)
    shared = (launcher.products.work, counters) if parts > 1 else (None, None)
    fuses = operands.norm is not None or operands.gate
    most = FUSED_TOKENS if fuses else TOKENS
    counts = (1, 2, *(8 * tiles for tiles in TILES))
    kernels = {tokens: variant(tokens) for tokens in counts if tokens <= most}

    def multiply(m: int) -> None:
        arguments = (
            operands.x,
            *matrix,
            operands.bias,
            operands.y,
            *shared,
            m,
            outputs,
            k,
            operands.pitch,
            *layout,
            *operands.fused(),
        )
        sizes = {"tokens": m, "outputs": outputs, "width": k, "splits": parts}
        tokens = next((tokens for tokens in kernels if tokens >= m), most)
        launcher.device.launch(kernels[tokens], sizes, arguments)

    gates = parts == 1 and n % (2 * TILE_ROWS) == 0
    return SegmentProduct(multiply, blocks=ceil_div(n, TILE_ROWS), gates=gates)
