"""gpt-oss with its experts as MXFP4 blocks, as its checkpoints have them: the model of the values
that the blocks mean, and kept as blocks where a backend multiplies them so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.errors import UnsupportedOpError, WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.quantization.float4 import fp4_part
from vllmx_testing.harness import all_logprobs
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan

safetensors = pytest.importorskip("safetensors.numpy")

REGISTRY = load_registry()
X, F, E = 4, 64, 96
DENSE: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 61, "hidden_size": E,
    "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": X, "num_experts_per_tok": 2,
    "sliding_window": 16, "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip
PACKED = DENSE | {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def raw(name: str, values: Any) -> RawTensor:
    return RawTensor(name, "u8", values.shape, values.reshape(-1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with blocks, and with what they mean as float32."""
    source = random_weights(REGISTRY.model_for(DENSE).load()(DENSE))
    dense = {name: source.part(name).dequantize() for name in source.names()}
    packed, random = dict(dense), np.random.default_rng(7)
    for name, values in dense.items():
        if ".experts." not in name or name.endswith("_bias"):
            continue
        count, cols, rows = values.shape  # input features first
        blocks = random.integers(0, 256, (count, rows, cols // 32, 16), np.uint8)
        scales = random.integers(121, 125, blocks.shape[:3]).astype(np.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        part = fp4_part(name, raw("b", blocks), raw("s", scales), (count, rows, cols))
        dense[name] = np.ascontiguousarray(part.dequantize().swapaxes(1, 2))
    folder = tmp_path_factory.mktemp("mxfp4")
    return write(folder / "packed", PACKED, packed), write(folder / "dense", DENSE, dense)


def load(folder: Path, backend: str, dtype: str = "f32") -> LoadedModel:
    checkpoint = open_checkpoint(REGISTRY, folder)
    options = LoadOptions(
        dtype=dtype, max_model_len=64, block_size=16, num_kv_blocks=4, max_num_seqs=1, num_threads=1
    )
    model = build_model(REGISTRY, checkpoint)
    try:
        loaded = (
            REGISTRY.get(BackendSpec, backend).load()().load(model, checkpoint.weights, options)
        )
    except UnsupportedOpError as error:
        pytest.skip(error.message)
    finally:
        checkpoint.weights.close()
    return loaded


@pytest.mark.parametrize("backend", ["cpu", "metal", "numpy", "torch"])
def test_blocks_are_the_values_that_they_mean(folders: tuple[Path, Path], backend: str) -> None:
    spec = REGISTRY.get(BackendSpec, backend)
    if (reason := spec.unavailable_reason()) is not None:
        pytest.skip(reason)
    plan = make_plan([Row(list(range(40)), 0, [0, 1, 2], "all")], 16)
    found, sizes = [], []
    for folder in folders:
        loaded = load(folder, backend)
        found.append(all_logprobs(loaded, plan, DENSE["vocab_size"]))
        sizes.append(loaded.info.weight_bytes)
        loaded.close()
    np.testing.assert_allclose(found[0], found[1], atol=2e-4)
    if backend == "metal":  # 4.25 bits a weight and not 32
        assert sizes[1] - sizes[0] > 0.8 * 2 * X * 3 * F * E * 4


def test_the_cpu_multiplies_blocks(folders: tuple[Path, Path]) -> None:
    """Blocks take 4.25 bits a weight and not 16 in bf16, as such models run."""
    plan = make_plan([Row(list(range(40)), 0, [0, 1, 2], "all")], 16)
    found, sizes = [], []
    for folder in folders:
        loaded = load(folder, "cpu", "bf16")
        found.append(all_logprobs(loaded, plan, DENSE["vocab_size"]))
        sizes.append(loaded.info.weight_bytes)
        loaded.close()
    assert sizes[1] - sizes[0] > 0.6 * 2 * X * 3 * F * E * 2
    error = np.abs(found[0] - found[1])  # activations are rounded to int8 beside blocks
    assert 0 < error.mean() < 0.05


def test_stacks_of_another_shape_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = safetensors.load_file(folders[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    flat = {key: tensors[f"{name}{key}"][0] for key in ("_blocks", "_scales")}
    wrong = write(
        tmp_path / "flat", PACKED, tensors | {f"{name}{key}": one for key, one in flat.items()}
    )
    with pytest.raises(WeightFormatError, match=r"layers\.1\.mlp.*down_proj_blocks.*4 axes"):
        load(wrong, "torch")
    dense = safetensors.load_file(folders[1] / "model.safetensors")
    fewer = write(tmp_path / "fewer", DENSE, dense | {name: dense[name][:3].copy()})
    with pytest.raises(WeightFormatError, match=r"down_proj' has shape.* entry 3 is wanted"):
        load(fewer, "torch")
    flat_dense = write(tmp_path / "rank", DENSE, dense | {name: dense[name][0].copy()})
    with pytest.raises(WeightFormatError, match=r"down_proj' has shape.* a stack of 3 axes"):
        load(flat_dense, "torch")
