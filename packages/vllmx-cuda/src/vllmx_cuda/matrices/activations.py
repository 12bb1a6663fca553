"""Activations as codes of 8 bits, as kernels for quantised weights want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.codes8 import CODES, GROUP
from vllmx_cuda.kernel_specs.gguf import RUN
from vllmx_cuda.kernel_specs.types import ceil_div
from vllmx_cuda.matrices.form import ActivationCodes, Launcher, ScratchBytes

Quantiser = Callable[[Launcher, Memory, int, ActivationCodes], Callable[[int], None]]
"""quantiser(launcher, x, cols, codes)(m) writes m rows of x into the scratch."""


def q8_bytes(cols: int, tokens: int) -> ScratchBytes:
    """Bytes of activations in "q8"."""
    return ScratchBytes(codes=tokens * cols, scales=tokens * (cols // RUN) * 8)


def _q8(launcher: Launcher, x: Memory, cols: int, codes: ActivationCodes) -> Callable[[int], None]:
    """int8 with a scale and two sums for each 32."""
    assert not codes.scale
    kernel = launcher.variant("quantize_q8")

    def quantise(m: int) -> None:
        scratch = launcher.products
        arguments = (x, scratch.codes, scratch.scales, cols)
        launcher.device.launch(kernel, {"rows": m, "width": cols}, arguments)

    return quantise


def rows_bytes(cols: int, tokens: int) -> ScratchBytes:
    """The memory of rows as codes of any kind in `CODES`."""
    return ScratchBytes(codes=tokens * cols, scales=4 * tokens)


def groups_bytes(cols: int, tokens: int) -> ScratchBytes:
    """Bytes of activations in groups; for whole fours of tokens, as cuBLASLt multiplies them."""
    codes = ActivationCodes("f8e4m3", groups=True)
    rows = codes.pitch(tokens)
    return ScratchBytes(codes=rows * cols, scales=4 * rows * ceil_div(cols, GROUP))


def _rows(
    launcher: Launcher, x: Memory, cols: int, codes: ActivationCodes
) -> Callable[[int], None]:
    """Codes with a scale for each row or group, or with one for all."""
    kernel = launcher.variant(
        "quantize_rows",
        VX_VEC=vector_width(cols),
        VX_CODE=CODES[codes.kind],
        VX_GROUPS=int(codes.groups),
    )

    def quantise(m: int) -> None:
        scratch = launcher.products
        arguments = (x, scratch.codes, scratch.scales, cols, codes.scale, codes.pitch(m))
        launcher.device.launch(kernel, {"rows": m, "width": cols}, arguments)

    return quantise


QUANTISERS: Mapping[str, Quantiser] = {"q8": _q8, **dict.fromkeys(CODES, _rows)}
