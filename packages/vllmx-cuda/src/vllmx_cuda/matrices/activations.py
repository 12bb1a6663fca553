"""Activations as codes of 8 bits, as kernels for quantised weights want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllmx_cuda.device import Memory
from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.codes8 import CODES
from vllmx_cuda.kernel_specs.gguf import RUN
from vllmx_cuda.matrices.form import Ops, ScratchBytes

Quantiser = Callable[[Ops, Memory, int, float], Callable[[int], None]]
"""quantiser(ops, x, cols, scale)(m) writes m rows of x into the scratch."""


def q8_bytes(cols: int, tokens: int) -> ScratchBytes:
    """Of "q8"."""
    return ScratchBytes(codes=tokens * cols, scales=tokens * (cols // RUN) * 8)


def _q8(ops: Ops, x: Memory, cols: int, scale: float) -> Callable[[int], None]:
    """int8 with a scale and two sums for each 32."""
    assert not scale
    kernel = ops.variant("quantize_q8")

    def quantise(m: int) -> None:
        scratch = ops.products
        arguments = (x, scratch.codes, scratch.scales, cols)
        ops.device.launch(kernel, {"rows": m, "width": cols}, arguments)

    return quantise


def rows_bytes(cols: int, tokens: int) -> ScratchBytes:
    """Of the keys of `CODES`."""
    return ScratchBytes(codes=tokens * cols, scales=4 * tokens)


def _rows(code: str) -> Quantiser:
    """Codes with a scale for each row, or with one for all."""

    def quantiser(ops: Ops, x: Memory, cols: int, scale: float) -> Callable[[int], None]:
        kernel = ops.variant("quantize_rows", VX_VEC=vector_width(cols), VX_CODE=CODES[code])

        def quantise(m: int) -> None:
            scratch = ops.products
            arguments = (x, scratch.codes, scratch.scales, cols, scale)
            ops.device.launch(kernel, {"rows": m, "width": cols}, arguments)

        return quantise

    return quantiser


QUANTISERS: Mapping[str, Quantiser] = {"q8": _q8, **{code: _rows(code) for code in CODES}}
