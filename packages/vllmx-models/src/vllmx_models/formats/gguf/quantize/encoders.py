"""Encoders of floats into quantised types.

numpy defines the bytes of every type (`k` and `legacy`; `blocks` decodes them). It encodes floats
and MXFP4, and all other types where no plugin is faster: vllmx-cpu, whose native encoder makes the
same bytes, is optional.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import BackendUnavailableError, WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import EncoderSpec
from vllmx_core.weights.encoding import Encoded, Encoder
from vllmx_core.weights.part import DENSE, WeightPart, dense_part
from vllmx_core.weights.tensor import RawTensor, bf16_to_f32, f32_to_bf16

from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, decode_blocks
from vllmx_models.formats.gguf.legacy_blocks import Blocks
from vllmx_models.formats.gguf.quantize import k, legacy
from vllmx_models.quantization.float8 import fp8_codes
from vllmx_models.quantization.int8 import int8_codes

logger = logging.getLogger("vllmx.encode")
VALUES_AT_ONCE = 1 << 17
"""Values of one pass: a search's temporaries stay in the second-level cache."""

QUANTIZERS: Mapping[str, Callable[[F32], Blocks]] = {
    "MXFP4": legacy.mxfp4,
    "Q8_0": legacy.q8_0,
    "Q4_0": legacy.q4_0,
    "Q4_1": legacy.q4_1,
    "Q5_0": legacy.q5_0,
    "Q5_1": legacy.q5_1,
    "Q2_K": k.q2_k,
    "Q3_K": k.q3_k,
    "Q4_K": k.q4_k,
    "Q5_K": k.q5_k,
    "Q6_K": k.q6_k,
}


def encode(name: str, values: F32) -> npt.NDArray[np.uint8]:
    """Float32 values, any shape whose last dimension is a multiple of the type's block, as the
    bytes of type `name`, flat. Values beyond the type's range are clipped.

    Raises:
        WeightFormatError: a value is not finite.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise WeightFormatError(
            f"a value is not finite, which {name} cannot express: repair the checkpoint"
        )
    if name == "F32":
        return flat.view(np.uint8)
    if name == "F16":
        return np.clip(flat, -65504, 65504).astype("<f2").view(np.uint8)
    if name == "BF16":
        return f32_to_bf16(flat).view(np.uint8)
    kind = TYPES_BY_NAME[name]
    quantizer = QUANTIZERS[name]
    blocks = flat.reshape(-1, kind.values)
    result = np.empty((len(blocks), kind.num_bytes), np.uint8)
    step = VALUES_AT_ONCE // kind.values
    with np.errstate(under="ignore"):
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            # numpy sums a single column in another order than several columns
            alone = len(some) == 1
            result[first : first + step] = quantizer(np.repeat(some, 2, 0) if alone else some)[
                : len(some)
            ]
    return result.reshape(-1)


def decode(name: str, data: npt.NDArray[np.uint8]) -> F32:
    """The inverse of `encode`, flat."""
    if name == "F32":
        return data.view("<f4")
    if name == "F16":
        return data.view("<f2").astype(np.float32)
    if name == "BF16":
        return bf16_to_f32(data.view("<u2"))
    return decode_blocks(TYPES_BY_NAME[name], data)


class NumpyEncoder:
    """Encodes every type on any machine, slowly."""

    kinds = QUANTIZERS.keys() | {"F32", "F16", "BF16", "int8", "fp8"}

    def encode(self, kind: str, rows: RawTensor, *, measure: bool = False) -> Encoded:
        """See `vllmx_core.weights.encoding.Encoder`."""
        values = rows.to_f32()
        if not np.isfinite(values).all():
            raise WeightFormatError(
                f"tensor {rows.name!r} has a value that is not finite, which {kind} cannot"
                " express: repair the checkpoint"
            )
        if kind in ("int8", "fp8"):
            codes, scales = (int8_codes if kind == "int8" else fp8_codes)(values)
            return Encoded(codes.reshape(-1).view(np.uint8), scales.reshape(-1))
        data = encode(kind, values)
        if not measure:
            return Encoded(data)
        flat = values.reshape(-1).astype(np.float64)
        difference = decode(kind, data) - flat
        return Encoded(data, None, float(np.square(difference).sum()), float(np.square(flat).sum()))


def encoder_for(registry: Registry, kind: str) -> Encoder:
    """Returns the fastest encoder of a type that can run here."""
    for spec in sorted(registry.all(EncoderSpec), key=lambda spec: -spec.priority):
        try:
            found: Encoder = spec.load()()
        except BackendUnavailableError as error:
            logger.info("encoder %s cannot run here: %s", spec.name, error.message)
            continue
        if kind in found.kinds:
            return found
    return NumpyEncoder()


def float_rows(part: WeightPart, begin: int, end: int) -> RawTensor:
    """Returns rows of any part as f32, f16 or bf16; those of a dense part as they are stored."""
    if part.layout == DENSE:
        raw = part.rows(begin, end).buffers["weight"]
        if raw.dtype in ("f32", "f16", "bf16"):
            return raw
    return dense_part(part.name, part.dequantize(begin, end)).buffers["weight"]
