"""FP8 as DeepSeek, Qwen and Hugging Face write it.

X.weight (rows, cols) F8_E4M3; X.weight_scale_inv or X.weight_scale: by `weight_block_size` one for
each block (128 x 128; smaller at the edges), else one for the tensor or for each row. Despite its
name the scale is multiplied: weight = float8 * scale. X.input_scale where activations are static.

DeepSeek-V4 names scales X.scale, and has experts in MXFP4: X.weight (rows, cols / 2) I8,
two e2m1 values to a byte, the low four bits first, and X.scale (rows, cols / 32) F8_E8M0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.weights.part import WeightPart, WeightSource

from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import checkpoint_part
from vllmx_models.quantization.options import QuantReader
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_FP4_GROUP = 32


def fp8(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, Fp8Scheme(config))


class Fp8Scheme:
    """Serves `fbgemm_fp8` as well, which has a scale for each row and dynamic activations."""

    weight_suffix = ".weight"
    markers = _SCALES
    companions = (".input_scale",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = QuantReader(config, str(config.get("quant_method", "fp8")))
        read.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        read.choice("scale_fmt", ("float", "ue8m0"), "float")
        read.choice("expert_dtype", ("fp8", "fp4"), "fp8")
        read.choice("quant_algo", ("FP8",), "FP8")
        read.choice("moe_quant_algo", ("FP8",), "FP8")
        self._activations = {
            "activations": read.choice("activation_scheme", ("dynamic", "static"), "dynamic"),
            "activation_bits": 8,
            "activation_strategy": "token",
        }
        self._block = _block(read)
        if self._block is not None:
            self._activations["activation_strategy"] = "group"
        elif self._activations["activations"] == "static":
            self._activations["activation_strategy"] = "tensor"
        self._excluded = read.modules("modules_to_not_convert", "ignored_layers")
        self.name = read.architecture

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module)

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        suffix = next(suffix for suffix in _SCALES if tensors.get(suffix) is not None)
        weight = tensors.get(".weight")
        if weight is not None and weight.dtype in ("i8", "u8"):
            return _fp4(name, tensors, suffix)
        return checkpoint_part(name, tensors, suffix, self._block, self._activations)


def _fp4(name: str, tensors: ModuleTensors, suffix: str) -> WeightPart:
    packed = tensors.need(".weight", ("i8", "u8"), rank=2)
    rows, cols = packed.shape[0], 2 * packed.shape[1]
    if cols % _FP4_GROUP:
        raise tensors.error(".weight", f"has {cols} columns", f"a multiple of {_FP4_GROUP}")
    scale = tensors.shaped(suffix, ("f8e8m0", "u8"), (rows, cols // _FP4_GROUP))
    return fp4_part(name, replace(packed, dtype="u8"), scale, (rows, cols))


def _block(read: QuantReader) -> tuple[int, int] | None:
    value = read.config.get("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise read.error("weight_block_size", "must be two integers or null")
    if any(type(size) is not int or not 0 < size <= 1 << 24 for size in value):
        raise read.error("weight_block_size", "must be two integers above 0")
    return value[0], value[1]
