"""Writes small quantised checkpoints and opens them as a user's would be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.part import WeightPart, WeightSource

Tensors = Mapping[str, NDArray[Any]]
REGISTRY: Registry = load_registry()
BF16, E4M3, E5M2, E8M0 = (
    np.dtype(dtype)
    for dtype in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e8m0fnu,
    )
)


def write_checkpoint(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def open_source(folder: Path, tensors: Tensors, quantization: Any) -> WeightSource:
    """The source that the plugins make of a checkpoint with this quantization_config."""
    write_checkpoint(folder, tensors, {"quantization_config": quantization, "dtype": "float32"})
    return open_checkpoint(REGISTRY, folder).weights


def open_part(
    folder: Path, tensors: Tensors, quantization: Any, name: str = "m.weight"
) -> WeightPart:
    """The part, after a look whether its rows can be had one range at a time."""
    part = open_source(folder, tensors, quantization).part(name)
    assert_rows_alone(part)
    return part


def assert_rows_alone(part: WeightPart) -> None:
    """Whether ranges of rows are decoded to what they are in the whole."""
    count = part.shape[0]
    with np.errstate(invalid="ignore"):  # signalling NaN
        whole = part.dequantize()
        for begin, end in ((0, count), (count // 3, count // 2 + 1), (count - 1, count)):
            assert_same_bits(part.dequantize(begin, end), whole[begin:end])


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal float32, zeros with their sign, NaN for NaN."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~number)
    np.testing.assert_array_equal(found.view(np.uint32)[number], expected.view(np.uint32)[number])
