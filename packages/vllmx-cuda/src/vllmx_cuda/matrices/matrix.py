"""A matrix on the device: what a linear and the head multiply by, and the embedding gathers
from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.matrices.activations import QUANTISERS
from vllmx_cuda.matrices.form import (
    ActivationCodes,
    Gather,
    Launcher,
    Operands,
    Segment,
    SegmentProduct,
)
from vllmx_cuda.matrices.products import columns


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """The products of all segments with one x."""

    segments: tuple[SegmentProduct, ...]
    quantise: Mapping[ActivationCodes, Callable[[int], None]]
    """The codes that segments may want -> what writes x as these into the scratch."""

    @property
    def alone(self) -> SegmentProduct | None:
        """The only segment, which a residual and a gate need."""
        return self.segments[0] if len(self.segments) == 1 else None

    @property
    def takes_norms(self) -> bool:
        return all(segment.blocks for segment in self.segments)

    def codes(self, m: int) -> ActivationCodes | None:
        """The codes that all segments want m rows of x in; None: they differ."""
        kinds = {s.codes if s.codes and s.wants_codes(m) else None for s in self.segments}
        return kinds.pop() if len(kinds) == 1 else None

    def enqueue(self, m: int, ready: ActivationCodes | None = None) -> None:
        """Enqueues the product of m rows. Where several segments want x as the same codes, they are
        made once; `ready` is what the scratch holds already."""
        for segment in self.segments:
            if segment.codes and segment.wants_codes(m) and segment.codes != ready:
                self.quantise[segment.codes](m)
                ready = segment.codes
            segment.enqueue(m)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Segments below each other, with the bias of a linear."""

    segments: tuple[Segment, ...]
    rows: int
    cols: int
    bias: Memory | None = None  # (rows,) float32
    rounded_bias: Memory | None = None  # (rows,) in the model's dtype, as cuBLASLt wants it

    @property
    def shape(self) -> tuple[Hashable, ...]:
        """Equal for matrices whose products are alike, such as those of other layers."""
        return (self.cols, self.bias is None, *((type(s.form), s.rows) for s in self.segments))

    def product(
        self, launcher: Launcher, x: Memory, y: Memory, out_dtype: str, **fused: Any
    ) -> MatrixProduct:
        """x (m, cols) @ matrix.T + bias into y (m, rows).

        Args:
            fused: the fields of `Operands` for it."""
        pitch = self.rows // 2 if fused.get("gate") else self.rows
        whole = Operands(x, y, pitch, out_dtype, self.bias, self.rounded_bias, **fused)
        products = []
        for s in self.segments:
            operands = columns(whole, s.begin, s.rows, ITEM_BYTES[out_dtype])
            products.append(s.form.product(launcher, s, operands))
        kinds = dict.fromkeys(p.codes for p in products if p.codes is not None)
        quantise = {c: QUANTISERS[c.kind](launcher, x, self.cols, c) for c in kinds}
        return MatrixProduct(tuple(products), quantise)

    def gather(self, launcher: Launcher, y: Memory) -> Gather:
        """Rows by number into y (count, cols)."""
        (segment,) = self.segments
        return segment.form.gather(launcher, segment, y)
