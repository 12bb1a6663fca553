"""The demo model in each quantised format of safetensors, beside its dequantised twin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER

from . import quantizers
from .quantizers import Quantised, ct_config

Array = NDArray[Any]
REGISTRY = load_registry()


@dataclass(frozen=True)
class Case:
    quantise: Callable[[Array], Quantised]
    config: dict[str, Any]


GPTQ = {"quant_method": "gptq", "sym": False}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
CASES = {
    "gptq 4 bit act-order": Case(
        partial(quantizers.gptq, bits=4, group_size=64, shuffled=True, v2=False),
        {**GPTQ, "bits": 4, "group_size": 64, "desc_act": True},
    ),
    "gptq 3 bit v2": Case(
        partial(quantizers.gptq, bits=3, group_size=128, shuffled=False, v2=True),
        {**GPTQ, "bits": 3, "group_size": 128, "checkpoint_format": "gptq_v2"},
    ),
    "awq": Case(
        partial(quantizers.awq, group_size=64),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
    ),
    "w4a16": Case(
        partial(quantizers.pack_quantized, bits=4, group_size=32),
        ct_config({"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}),
    ),
    "w8a8": Case(
        quantizers.int8,
        ct_config(
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "dynamic": True, "strategy": "token"},
        ),
    ),
    "compressed-tensors fp8": Case(
        partial(quantizers.fp8, block=(1, 4096), name="weight_scale"), ct_config(FLOAT8)
    ),
    "fp8 blocks": Case(
        partial(quantizers.fp8, block=(128, 96), name="weight_scale_inv"),  # 96 leaves edges
        {"quant_method": "fp8", "weight_block_size": [128, 96]},
    ),
    "modelopt fp8": Case(
        partial(quantizers.fp8, block=(4096, 4096), name="weight_scale", whole=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    ),
    "modelopt nvfp4": Case(
        quantizers.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    ),
    "mlx 4 bit": Case(
        partial(quantizers.mlx_affine, bits=4, group_size=64),
        {"group_size": 64, "bits": 4, "mode": "affine"},
    ),
    "mlx 3 bit": Case(
        partial(quantizers.mlx_affine, bits=3, group_size=32), {"group_size": 32, "bits": 3}
    ),
}


@cache
def demo_tensors() -> dict[str, Array]:
    source = open_checkpoint(REGISTRY, MODEL_FOLDER).weights
    return {name: source.part(name).dequantize() for name in source.names()}


def write_pair(folder: Path, case: Case) -> tuple[Path, Path]:
    """The quantised checkpoint and its twin with the float32 values that it means."""
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    quantised: dict[str, Array] = {}
    twin: dict[str, Array] = {}
    for name, weight in demo_tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" not in module:
            quantised[name] = twin[name] = weight
            continue
        tensors, twin[name] = case.quantise(weight)
        quantised.update({f"{module}.{suffix}": value for suffix, value in tensors.items()})
    written = {**config, "quantization_config": case.config}
    return (
        write_model(folder / "quantised", quantised, written),
        write_model(folder / "twin", twin, {**config, "torch_dtype": "float32"}),
    )


def write_model(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_FOLDER / file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder
