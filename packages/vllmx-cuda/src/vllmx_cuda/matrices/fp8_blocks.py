"""FP8 weights with a scale for each 128 x 128, times activations as codes with a scale for each 128
columns of a row: by cuBLASLt, which has it on Hopper, or by our own kernel where `mma` multiplies
such codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllmx_cuda.device.device import Product
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs.codes8 import E4M3_ARCHITECTURES
from vllmx_cuda.matrices.form import ActivationCodes, Launcher, Operands, Segment
from vllmx_cuda.matrices.products import alignment

X_CODES = ActivationCodes("f8e4m3", groups=True)


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """The product of a segment, in the ways that there are."""

    launcher: Launcher
    segment: Segment
    operands: Operands
    scales: Memory

    @property
    def is_own(self) -> bool:
        """True if our own kernel multiplies any number of rows."""
        return self.launcher.target.arch in E4M3_ARCHITECTURES

    def exists(self, m: int) -> bool:
        """True if this way can multiply m rows."""
        return self.is_own or self._by_cublas(m)

    def _by_cublas(self, m: int) -> bool:
        return self.launcher.device.can_multiply(self._product(m))

    def _product(self, m: int) -> Product:
        """The product of m rows and rows of padding, whose results are of no use to anybody."""
        operands, segment = self.operands, self.segment
        spans = [self.launcher.products.codes, segment.data, operands.y]
        spans += [self._bias] if self._bias else []
        return Product(
            X_CODES.pitch(m),
            segment.rows,
            segment.cols,
            "f8e4m3",
            operands.out_dtype,
            self._bias is not None,
            operands.pitch,
            alignment(*spans),
            blocks=True,
        )

    @property
    def _bias(self) -> Memory | None:
        operands = self.operands
        return operands.bias if operands.out_dtype == "f32" else operands.rounded_bias

    def lowered(self) -> Callable[[int], None]:
        """Enqueues it for so many rows, whose codes are in the scratch."""
        launcher, operands, segment = self.launcher, self.operands, self.segment
        rows, cols, out = segment.rows, segment.cols, int(operands.out_dtype == "f32")
        own = launcher.variant("codes8_blocks", VX_OUT=out) if self.is_own else None

        def multiply(m: int) -> None:
            scratch = launcher.products
            if own is None:
                scales = scratch.scales, self.scales
                launcher.device.multiply(
                    self._product(m), scratch.codes, segment.data, operands.y, self._bias, scales
                )
                return
            arguments = (
                scratch.codes,
                scratch.scales,
                segment.data,
                self.scales,
                operands.bias,
                operands.y,
                m,
                rows,
                cols,
                X_CODES.pitch(m),
                operands.pitch,
            )
            launcher.device.launch(own, {"tokens": m, "outputs": rows, "width": cols}, arguments)

        return multiply
