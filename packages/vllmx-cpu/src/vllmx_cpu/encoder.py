"""Quantises on the CPU by the native code of native/encode.h."""

from __future__ import annotations

from ctypes import byref
from math import prod

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights.encoding import Encoded
from vllmx_core.weights.tensor import RawTensor

from vllmx_cpu.native import Isa, choose_isa, library
from vllmx_cpu.structs import BLOCK_KINDS, ROW_KINDS, VX_DTYPES, VxEncode

_BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Values and bytes of a block."""


class NativeEncoder:
    """An `Encoder` for the best instruction set unless one is named. Raises
    BackendUnavailableError where the kernels cannot be loaded."""

    kinds = _BLOCKS.keys() | ROW_KINDS.keys()

    def __init__(self, isa: Isa | None = None) -> None:
        self._library = library()
        self._isa = (isa or choose_isa()).index

    def encode(self, kind: str, rows: RawTensor, *, measure: bool = False) -> Encoded:
        count, cols = prod(rows.shape[:-1]), rows.shape[-1]
        scales: F32 | None = None
        if kind in ROW_KINDS:
            data = np.empty(count * cols, np.uint8)
            scales = np.empty(count, np.float32)
        else:
            values, num_bytes = _BLOCKS[kind]
            assert cols % values == 0, f"{cols} values are no whole blocks of {kind}"
            data = np.empty(count * cols // values * num_bytes, np.uint8)
        stored = rows.data  # read now, and there until the call has ended
        job = VxEncode(
            ROW_KINDS.get(kind) or BLOCK_KINDS[kind],
            VX_DTYPES[rows.dtype],
            stored.ctypes.data,
            count,
            cols,
            measure,
            data.ctypes.data,
            None if scales is None else scales.ctypes.data,
            0.0,
            0.0,
        )
        if self._library.vx_encode(self._isa, byref(job)):
            raise WeightFormatError(
                f"tensor {rows.name!r} has a value that is not finite, which {kind} cannot"
                " express: repair the checkpoint"
            )
        return Encoded(data, scales, job.squared_error, job.squared_value)
