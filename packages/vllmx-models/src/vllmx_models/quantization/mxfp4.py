"""MXFP4 of gpt-oss: the experts' weights in blocks of 32 e2m1 values with one exponent.

X_blocks (experts, rows, cols / 32, 16) U8: two values to a byte, the low four bits first; X_scales
(experts, rows, cols / 32) U8: the block is multiplied by 2 ** (scale - 127). The part X has the
shape (experts, rows, cols), rows being output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.weights.part import WeightPart, WeightSource

from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.options import QuantReader
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

BLOCK = 32


def mxfp4(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, Mxfp4Scheme(config))


class Mxfp4Scheme:
    name = "mxfp4"
    weight_suffix = ""
    markers = ("_blocks",)
    companions = ("_scales",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._excluded = QuantReader(config, self.name).modules("modules_to_not_convert")

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module)

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        blocks = tensors.need("_blocks", ("u8",), rank=4)
        *lead, count, width = blocks.shape
        if width != BLOCK // 2:
            found = f"has shape {list(blocks.shape)}"
            raise tensors.error("_blocks", found, f"{BLOCK // 2} bytes on the last axis")
        scales = tensors.shaped("_scales", ("u8", "f8e8m0"), (*lead, count))
        return fp4_part(name, blocks, scales, (*lead, count * BLOCK))
