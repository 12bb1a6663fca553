"""The interface of encoders, which turn floats into quantised types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.tensor import RawTensor


class Encoded(Record):
    """Rows in a quantised type."""

    data: npt.NDArray[np.uint8]
    """Flat: the blocks of a GGUF type, or the codes of "int8" and "fp8", row after row."""
    scales: F32 | None = None
    """(rows,) of "int8" and "fp8"."""
    squared_error: float = 0.0
    """Sum of the squared errors, if it was asked for."""
    squared_value: float = 0.0
    """Sum of the squared values, if it was asked for."""


class Encoder(Protocol):
    """Quantises rows. All encoders make the same bytes of the same values, those of
    `vllmx_models.formats.gguf.quantize.encoders.NumpyEncoder`; some are faster."""

    @property
    def kinds(self) -> Collection[str]:
        """GGUF block types ("Q4_K"), and "int8" and "fp8" with a scale for each row."""
        ...

    def encode(self, kind: str, rows: RawTensor, *, measure: bool = False) -> Encoded:
        """`rows` are f32, f16 or bf16, (rows, cols); cols is a multiple of the kind's block. Called
        by many threads at once. With `measure` the two sums are filled for block types.

        Raises WeightFormatError that names the tensor when a value is not finite."""
        ...
