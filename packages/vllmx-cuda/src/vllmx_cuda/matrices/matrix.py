"""A matrix on the device: what a linear and the head multiply by, and the embedding gathers
from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllmx_cuda.device import Memory
from vllmx_cuda.dtypes import ITEM_BYTES
from vllmx_cuda.matrices.activations import QUANTISERS
from vllmx_cuda.matrices.form import Gather, Operands, Ops, Segment
from vllmx_cuda.matrices.products import columns


@dataclass(frozen=True, slots=True)
class Matrix:
    """Segments below each other, with the bias of a linear."""

    segments: tuple[Segment, ...]
    rows: int
    cols: int
    bias: Memory | None = None  # (rows,) float32
    rounded_bias: Memory | None = None  # (rows,) in the model's dtype, as cuBLASLt wants it

    def product(self, ops: Ops, x: Memory, y: Memory, out_dtype: str) -> Callable[[int], None]:
        """x (m, cols) @ matrix.T + bias into y (m, rows), for as many rows as it is called with.
        Where several segments want x as the same codes, they are made once."""
        whole = Operands(x, y, self.rows, out_dtype, self.bias, self.rounded_bias)
        products = []
        for s in self.segments:
            operands = columns(whole, s.begin, s.rows, ITEM_BYTES[out_dtype])
            products.append(s.form.product(ops, s, operands))
        kinds = {p.codes for p in products if p.codes is not None}
        quantise = {kind: QUANTISERS[kind](ops, x, self.cols) for kind in kinds}

        def multiply(m: int) -> None:
            ready = None  # the codes that are in the scratch
            for product in products:
                if product.codes is not None and product.wants_codes(m) and product.codes != ready:
                    quantise[product.codes](m)
                    ready = product.codes
                product.enqueue(m)

        return multiply

    def gather(self, ops: Ops, y: Memory) -> Gather:
        """Rows by number into y (count, cols)."""
        (segment,) = self.segments
        return segment.form.gather(ops, segment, y)
