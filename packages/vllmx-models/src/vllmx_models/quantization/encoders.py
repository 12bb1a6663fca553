"""Chooses who quantises: an encoder that a plugin brings, or else numpy."""

from __future__ import annotations

import logging

import numpy as np
from vllmx_core.errors import BackendUnavailableError, WeightFormatError
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import EncoderSpec
from vllmx_core.weights.encoding import Encoded, Encoder
from vllmx_core.weights.part import DENSE, RawTensor, WeightPart

from vllmx_models.formats.gguf.quantize.encode import QUANTIZERS, decode, encode
from vllmx_models.quantization.eight_bits import fp8_codes, int8_codes

logger = logging.getLogger("vllmx.encode")


class NumpyEncoder:
    """The definition, and the fallback: every type, anywhere, slowly."""

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
    """The fastest encoder of a type that can run here."""
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
    """Rows of any part as f32, f16 or bf16; those of a dense part as they lie in the file."""
    if part.layout == DENSE:
        raw = part.rows(begin, end).buffers["weight"]
        if raw.dtype in ("f32", "f16", "bf16"):
            return raw
    values = np.ascontiguousarray(part.dequantize(begin, end), np.float32)
    return RawTensor(part.name, "f32", values.shape, values.reshape(-1).view(np.uint8))
