"""The places where a quantisation is found, and the configs of public models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.specs import QuantizationSpec
from vllmx_models.quantization.detect import find_quantization
from vllmx_models.quantization.source import QuantizedSource

from .checkpoints import BF16, E4M3, REGISTRY, open_source, write_checkpoint

DATA = Path(__file__).parents[2] / "data" / "configs"
SHARED = Path(__file__).parents[4] / "shared" / "configs" / "aiconfigurator"
DENSE = {"m.weight": np.ones((2, 2), BF16)}

REFUSED = {
    "nvidia--DeepSeek-V4-Flash-NVFP4": r"quant_algo = MIXED_PRECISION .*known: FP8",
    "nvidia--DeepSeek-V4-Pro-NVFP4": r"quant_algo = MIXED_PRECISION .*known: FP8",
}
"""Configs that call themselves fp8 and have experts in NVFP4."""


def shared_configs() -> list[Any]:
    if not SHARED.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason="../shared/configs is absent"))]
    paths = sorted(SHARED.glob("*_config.json"))
    quantised = [path for path in paths if '"quant' in path.read_text()]
    return [pytest.param(path, id=path.name) for path in quantised]


def scheme_of(quantization: Any) -> QuantizedSource:
    spec = REGISTRY.get(QuantizationSpec, quantization["quant_method"])
    source: QuantizedSource = spec.load()(_Empty(), quantization)
    return source


class _Empty:
    def names(self) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("path", shared_configs())
def test_shared_configs_are_read_or_refused(path: Path, tmp_path: Path) -> None:
    config = json.loads(path.read_text())
    if "quantization" in config:  # hf_quant_config.json
        (tmp_path / "hf_quant_config.json").write_text(path.read_text())
        config = {}
    quantization = find_quantization(tmp_path, config)
    assert quantization is not None
    refusal = REFUSED.get(path.name.removesuffix("_config.json"))
    if refusal is None:
        assert isinstance(scheme_of(quantization), QuantizedSource)
    else:
        with pytest.raises(UnsupportedModelError, match=refusal):
            scheme_of(quantization)


@pytest.mark.parametrize("name", ["Qwen--Qwen3-32B-FP8", "openai--gpt-oss-20b"])
def test_configs_in_this_repository(name: str, tmp_path: Path) -> None:
    config = json.loads((DATA / f"{name}.json").read_text())
    assert scheme_of(find_quantization(tmp_path, config)).names() == frozenset()


def test_qwen3_fp8_decodes_its_blocks(tmp_path: Path) -> None:
    config = json.loads((DATA / "Qwen--Qwen3-32B-FP8.json").read_text())
    tensors = {
        "model.layers.0.mlp.up_proj.weight": np.full((130, 128), 0x38, np.uint8).view(E4M3),
        "model.layers.0.mlp.up_proj.weight_scale_inv": np.array([[2], [0.5]], np.float32),
    }
    part = open_source(tmp_path, tensors, config["quantization_config"]).part(next(iter(tensors)))
    assert part.dequantize()[[0, 127, 128, 129], 0].tolist() == [2, 2, 0.5, 0.5]


FP8 = {"quant_method": "fp8"}
MODELOPT = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, None),
        ({"quantization_config": FP8}, {}, FP8),
        ({"quantization_config": None, "compression_config": FP8}, {}, FP8),
        ({"text_config": {"quantization_config": FP8}}, {}, FP8),
        ({"text_config": 3}, {}, None),
        ({"quantization_config": MODELOPT}, {}, {**MODELOPT, "quant_method": "modelopt"}),
        (
            {"quantization_config": {"config_groups": {}}},
            {},
            {"config_groups": {}, "quant_method": "compressed-tensors"},
        ),
        ({"quantization_config": {"x": 1}}, {}, {"x": 1}),
        ({"quantization_config": "q4"}, {}, "q4"),
        (
            {},
            {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
            {"quant_algo": "FP8", "quant_method": "modelopt"},
        ),
        ({}, {"hf_quant_config.json": {"quantization": "FP8"}}, None),
        ({}, {"quantize_config.json": {"bits": 4}}, {"bits": 4, "quant_method": "gptq"}),
        ({}, {"quant_config.json": {"w_bit": 4}}, {"w_bit": 4, "quant_method": "awq"}),
        ({"quantization_config": FP8}, {"quantize_config.json": {"bits": 4}}, FP8),
    ],
)
def test_where_it_is_found(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], expected: Any
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert find_quantization(tmp_path, config) == expected


def test_a_config_beside_the_weights_is_used(tmp_path: Path) -> None:
    tensors = {
        "m.weight": np.full((2, 2), 0x38, np.uint8).view(E4M3),
        "m.weight_scale": np.float32([3]),
    }
    write_checkpoint(tmp_path, tensors, {"dtype": "bfloat16"})
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    checkpoint = open_checkpoint(REGISTRY, tmp_path)
    assert checkpoint.config["quantization_config"]["quant_method"] == "modelopt"
    assert checkpoint.weights.part("m.weight").dequantize().tolist() == [[3, 3], [3, 3]]


def test_unknown_methods_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bitsandbytes'.*awq, .*gptq, .*mxfp4"):
        open_source(tmp_path, DENSE, {"quant_method": "bitsandbytes"})


def test_a_checkpoint_that_was_dequantised_stays_dense(tmp_path: Path) -> None:
    source = open_source(tmp_path, DENSE, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert source.part("m.weight").layout.kind == "dense"
    source.close()
