"""NVIDIA ModelOpt: FP8 and NVFP4, from config.json or hf_quant_config.json.

FP8: X.weight (rows, cols) F8_E4M3 times X.weight_scale, one for the tensor or for each row.
NVFP4: X.weight (rows, cols / 2) U8, two e2m1 values to a byte, the low four bits first;
X.weight_scale (rows, cols / 16) F8_E4M3 times X.weight_scale_2, one for the tensor.
X.input_scale: the static scale of the activations. A checkpoint of mixed precision has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.weights.part import WeightPart, WeightSource

from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import checkpoint_part
from vllmx_models.quantization.options import QuantReader
from vllmx_models.quantization.scaled import input_scale
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

GROUP = 16
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "FP8": ("fp8",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8",),
    "NVFP4": ("fp4",),
    "W4A16_NVFP4": ("fp4",),
    "MIXED_PRECISION": ("fp8", "fp4"),
}
"""quant_algo -> kinds of weights that it may have."""


def modelopt(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, ModelOptScheme(config))


class ModelOptScheme:
    weight_suffix = ".weight"
    markers = (".weight_scale",)
    companions = (".weight_scale_2", ".input_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = QuantReader(config, "modelopt")
        algorithm = read.choice("quant_algo", ALGORITHMS)
        self._kinds = ALGORITHMS[algorithm]
        if "fp4" in self._kinds:
            read.choice("group_size", (GROUP,), GROUP)
        for layer, options in read.mapping("quantized_layers").items():
            _check_layer(layer, options)
        self._excluded = read.modules("exclude_modules", "ignore")
        self.name = f"modelopt {algorithm}"

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module)

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        weight = tensors.need(".weight", ("f8e4m3", "u8"), rank=2)
        kind = "fp4" if weight.dtype == "u8" else "fp8"
        if kind not in self._kinds:
            raise tensors.error(".weight", f"is stored as {weight.dtype}", " or ".join(self._kinds))
        has_input = bool(input_scale(tensors))
        activations = {
            "activations": "static" if has_input else "none",
            "activation_bits": 4 if kind == "fp4" else 8,
            "activation_strategy": "tensor_group" if kind == "fp4" else "tensor",
        }
        if kind == "fp8":
            return checkpoint_part(name, tensors, ".weight_scale", None, activations)
        rows, cols = weight.shape[0], weight.shape[1] * 2
        if cols % GROUP:
            found = f"has shape {list(weight.shape)}"
            raise tensors.error(".weight", found, f"a multiple of {GROUP // 2} bytes in a row")
        return fp4_part(
            name,
            weight,
            tensors.shaped(".weight_scale", ("f8e4m3",), (rows, cols // GROUP)),
            (rows, cols),
            global_scale=tensors.shaped(".weight_scale_2", ("f32",), (), (1,)),
            combine="multiply",
            extra=input_scale(tensors),
            activations=activations,
        )


def _check_layer(layer: str, options: Any) -> None:
    read = QuantReader(options if isinstance(options, Mapping) else {}, f"modelopt layer {layer}")
    if read.choice("quant_algo", ALGORITHMS) not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        read.choice("group_size", (GROUP,), GROUP)
