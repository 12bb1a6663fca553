"""Rows of int8 with scales: of compressed-tensors, and as `--isq int8` makes them (W8A8)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import Index, Layout, StoredPart
from vllmx_core.weights.tensor import DType, RawTensor

from vllmx_models.quantization.affine import CodedLayout
from vllmx_models.quantization.pack_int import coded_of, matrix
from vllmx_models.quantization.scaled import Options, over, row_scale

INT8_MAX = np.float32(127)
TOKEN_ACTIVATIONS: Options = {
    "activations": "dynamic",
    "activation_bits": 8,
    "activation_strategy": "token",
    "activation_symmetric": True,
    "strategy": "channel",
}
"""Activations that are quantised for each token, in the words of compressed-tensors."""


class Int8(CodedLayout):
    """Buffers weight, scale and perhaps zero_point, row by row."""

    kind: ClassVar[str] = "int8"

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        """See `Layout.codes`: the integers plus 128."""
        assert isinstance(rows, slice)
        zeros: AnyArray = np.array([[128]])
        if "zero_point" in part.buffers:
            stored = np.asarray(part.buffers["zero_point"].in_memory().view())
            zeros = matrix(stored).astype(np.int32) + 128
        weight = np.asarray(part.buffers["weight"].rows(rows.start, rows.stop).view())
        return coded_of(part, weight.view(np.uint8) ^ np.uint8(128), zeros, rows)

    def of_width(self, cols: int) -> Layout:
        return Int8(self.bits, cols, self.options)

    def col_unit(self, cols: int, *, shuffled: bool) -> int:
        return 1


def int8_layout(cols: int) -> Int8:
    options = {**TOKEN_ACTIVATIONS, "activation_type": "int", "symmetric": True}
    return Int8(8, cols, options)


def int8_codes(values: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Returns (rows, cols) finite values as codes and (rows, 1) scales; the greatest magnitude of
    each row becomes 127."""
    scale = row_scale(values, INT8_MAX)
    return np.rint(over(values, scale)).astype(np.int8), scale


def int8_part(
    name: str, shape: tuple[int, ...], codes: npt.NDArray[np.uint8], scales: F32
) -> StoredPart:
    """Returns a part of the bytes of the codes and one scale for each row."""
    return StoredPart(
        name, shape, int8_layout(shape[1]), row_buffers(name, "i8", shape, codes, scales)
    )


def row_buffers(
    name: str, dtype: DType, shape: tuple[int, ...], codes: npt.NDArray[np.uint8], scales: F32
) -> dict[str, RawTensor]:
    """Returns the buffers of codes with one scale for each row."""
    return {
        "weight": RawTensor(name, dtype, shape, codes),
        "scale": RawTensor(f"{name}_scale", "f32", (shape[0], 1), scales.view(np.uint8)),
    }
