"""Chooses the encoder: a plugin's, or numpy."""

from __future__ import annotations

import logging

import numpy as np
from vllmx_core.errors import BackendUnavailableError, WeightFormatError
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import EncoderSpec
from vllmx_core.weights.encoding import Encoded, Encoder
from vllmx_core.weights.part import DENSE, WeightPart, dense_part
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.formats.gguf.quantize.encode import QUANTIZERS, decode, encode
from vllmx_models.quantization.float8 import fp8_codes
from vllmx_models.quantization.int8 import int8_codes

logger = logging.getLogger("vllmx.encode")


class NumpyEncoder:
    """The reference and fallback: every type on any machine, slowly."""

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
