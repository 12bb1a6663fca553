"""Fuzz target: any quantization_config over tensors of any shape, every part dequantised.

An input is JSON: `quantization_config`, and `tensors` with a dtype and a shape for each name.
"""

from __future__ import annotations

import json
import math
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.checkpoint import open_checkpoint

from .folders import folder_of, registry
from .mutations import as_json, changed_json

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1,
         "F8_E8M0": 1}  # fmt: skip
MAX_FILE_BYTES = 1 << 20
N = 32
"""Rows and columns of the matrices."""
_CT: dict[str, Any] = {"targets": ["Linear"]}
SEEDS: tuple[tuple[dict[str, Any], dict[str, list[Any]]], ...] = (
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
        {"qweight": ["I32", [4, N]], "qzeros": ["I32", [2, 4]], "scales": ["F16", [2, N]],
         "g_idx": ["I32", [N]]},
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
        {"qweight": ["I32", [N, 4]], "qzeros": ["I32", [2, 4]], "scales": ["F16", [2, N]]},
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        {"weight": ["F8_E4M3", [N, N]], "weight_scale_inv": ["F32", [2, 2]]},
    ),
    (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        {"weight": ["F8_E4M3", [N, N]], "weight_scale": ["F32", [N, 1]]},
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None},
        {"weight": ["F8_E4M3", [N, N]], "weight_scale": ["F32", []], "input_scale": ["F32", []]},
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {"weight": ["U8", [N, N // 2]], "weight_scale": ["F8_E4M3", [N, 2]],
         "weight_scale_2": ["F32", []]},
    ),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {"_blocks": ["U8", [2, N, 1, 16]], "_scales": ["U8", [2, N, 1]]},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "g": _CT | {"weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                    "group_size": 16, "symmetric": True}}}},
        {"weight_packed": ["I32", [N, 4]], "weight_shape": ["I64", [2]],
         "weight_scale": ["BF16", [N, 2]]},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
            "g": _CT | {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
        {"weight": ["F8_E4M3", [N, N]], "weight_scale": ["BF16", [N, 1]]},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {
            "g": _CT | {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}},
        {"weight": ["I8", [N, N]], "weight_scale": ["F32", [N, 1]]},
    ),
)  # fmt: skip


def one_input(data: bytes) -> bool:
    """Whether the input is a checkpoint of which all parts decode. Only errors made for users are
    expected."""
    stated = _stated(data)
    if stated is None:
        return False
    config, tensors = stated
    decoded = 0
    files = {"config.json": json.dumps({"quantization_config": config}).encode()}
    with folder_of(files | {"model.safetensors": _file(tensors)}) as folder, suppress(VllmxError):
        weights = open_checkpoint(registry(), folder).weights
        try:
            for name in weights.names():
                with suppress(VllmxError):
                    part = weights.part(name)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", RuntimeWarning)  # scales hold NaN
                        values = part.dequantize()
                    assert values.dtype == np.float32, name
                    assert values.shape == part.shape, name
                    decoded += 1
            return decoded == len(weights.names())
        finally:
            weights.close()
    return False


def mutations() -> st.SearchStrategy[bytes]:
    """Configs, shapes and dtypes that say something else."""
    keys = ["bits", "group_size", "sym", "dynamic", "ignore", "quantized_layers", "actorder",
            "input_activations", "block_structure", "zero_point", "modules_to_not_convert",
            "m.bias", "m.weight", "kv_cache_scheme", "sparsity_config", *BYTES]  # fmt: skip
    return changed_json([json.loads(seed) for seed in seeds()], keys).map(as_json)


def seeds() -> list[bytes]:
    """A module of each scheme."""
    return [
        as_json(
            {
                "quantization_config": config,
                "tensors": {
                    f"m{name}" if name.startswith("_") else f"m.{name}": entry
                    for name, entry in tensors.items()
                },
            }
        )
        for config, tensors in SEEDS
    ]


def _stated(data: bytes) -> tuple[Any, dict[str, tuple[str, list[int]]]] | None:
    """What the input asks for; None where no file can be made of it."""
    try:
        value = json.loads(data)
        tensors = {str(name): (kind, shape) for name, (kind, shape) in value["tensors"].items()}
        sizes = [size for _, shape in tensors.values() for size in shape]
        if not all(type(size) is int and 0 <= size < 1 << 12 for size in sizes):
            return None
        if sum(map(_num_bytes, tensors.values())) > MAX_FILE_BYTES:
            return None
        return value["quantization_config"], tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _num_bytes(tensor: tuple[str, list[int]]) -> int:
    return math.prod(tensor[1]) * BYTES[tensor[0]]


def _file(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """A safetensors file of small positive words, so that an index or a size is often valid."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + _num_bytes(tensor)
        header[name] = {"dtype": tensor[0], "shape": tensor[1], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    body = bytearray(position)
    for name, (kind, _) in tensors.items():
        begin, end = header[name]["data_offsets"]  # type: ignore[misc]
        word = (N if name.endswith("_shape") else 1).to_bytes(BYTES[kind], "little")
        body[begin:end] = word * ((end - begin) // BYTES[kind])  # type: ignore[operator]
    return len(text).to_bytes(8, "little") + text + bytes(body)
