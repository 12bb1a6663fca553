"""The tensor types of GGUF files, and the layout under which backends see them.

A quantised tensor has one buffer "weight" of bytes, (rows, bytes per row), and the layout
`Gguf(bits, group, {"type": "Q4_K"})`, so that a backend may take the blocks as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.files import FileRange
from vllmx_core.weights.part import DENSE, Layout, StoredPart
from vllmx_core.weights.tensor import DType, RawTensor

from vllmx_models.formats.gguf import k_blocks, legacy_blocks

VALUES_AT_ONCE = 1 << 18
"""Decoded values of one pass: its temporaries stay in the cache."""


class TensorType(Record):
    """One type: `values` numbers in `num_bytes` bytes."""

    name: str
    values: int
    num_bytes: int
    dense: DType | None = None
    """The element type if a block is a single number."""
    decoder: Callable[[legacy_blocks.Blocks], F32] | None = None

    @property
    def layout(self) -> Layout:
        if self.dense is not None:
            return DENSE
        bits = self.num_bytes * 8 / self.values
        return Gguf(bits, self.values, {"type": self.name})


class Gguf(Layout):
    """Blocks of the type that the option "type" names."""

    kind: ClassVar[str] = "gguf"

    @property
    def gguf_type(self) -> str:
        return str(self.options["type"])

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        kind = TYPES_BY_NAME[self.gguf_type]
        data = part.buffers["weight"].rows(begin, end).data
        return decode_blocks(kind, data).reshape(end - begin, *part.shape[1:])


def _dense(name: str, dtype: DType, num_bytes: int) -> TensorType:
    return TensorType(name, 1, num_bytes, dense=dtype)


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: _dense("F32", "f32", 4),
    1: _dense("F16", "f16", 2),
    2: TensorType("Q4_0", 32, 18, decoder=legacy_blocks.q4_0),
    3: TensorType("Q4_1", 32, 20, decoder=legacy_blocks.q4_1),
    6: TensorType("Q5_0", 32, 22, decoder=legacy_blocks.q5_0),
    7: TensorType("Q5_1", 32, 24, decoder=legacy_blocks.q5_1),
    8: TensorType("Q8_0", 32, 34, decoder=legacy_blocks.q8_0),
    10: TensorType("Q2_K", 256, 84, decoder=k_blocks.q2_k),
    11: TensorType("Q3_K", 256, 110, decoder=k_blocks.q3_k),
    12: TensorType("Q4_K", 256, 144, decoder=k_blocks.q4_k),
    13: TensorType("Q5_K", 256, 176, decoder=k_blocks.q5_k),
    14: TensorType("Q6_K", 256, 210, decoder=k_blocks.q6_k),
    20: TensorType("IQ4_NL", 32, 18, decoder=legacy_blocks.iq4_nl),
    23: TensorType("IQ4_XS", 256, 136, decoder=k_blocks.iq4_xs),
    24: _dense("I8", "i8", 1),
    25: _dense("I16", "i16", 2),
    26: _dense("I32", "i32", 4),
    27: _dense("I64", "i64", 8),
    28: _dense("F64", "f64", 8),
    30: _dense("BF16", "bf16", 2),
    39: TensorType("MXFP4", 32, 17, decoder=legacy_blocks.mxfp4),
}
TYPES_BY_NAME: Mapping[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}
FOREIGN_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that exist and are not read here."""


def weight_part(
    name: str,
    kind: TensorType,
    shape: tuple[int, ...],
    stored: npt.NDArray[np.uint8] | FileRange,
) -> StoredPart:
    """Returns a tensor of the file; `stored` are its bytes, row after row."""
    if kind.dense is not None:
        raw = RawTensor(name, kind.dense, shape, stored)
        return StoredPart(name, shape, kind.layout, {"weight": raw})
    row_bytes = shape[-1] // kind.values * kind.num_bytes
    raw = RawTensor(name, "u8", (*shape[:-1], row_bytes), stored)
    return StoredPart(name, shape, kind.layout, {"weight": raw})


def decode_blocks(kind: TensorType, data: npt.NDArray[np.uint8]) -> F32:
    """The values of consecutive blocks, flat. Scales that are not finite give such values."""
    assert kind.decoder is not None, f"{kind.name} has no blocks"
    blocks = data.reshape(-1, kind.num_bytes)
    values: F32 = np.empty(len(blocks) * kind.values, np.float32)
    step = VALUES_AT_ONCE // kind.values
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            some = kind.decoder(blocks[first : first + step])
            values[first * kind.values : first * kind.values + some.size] = some.reshape(-1)
    return values
