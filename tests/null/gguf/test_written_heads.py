"""Layers of multi-token prediction in written GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from vllmx_core.model import Model, heads_of
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import WeightSource
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

from . import hybrid_families as hybrids
from . import hybrid_writers
from . import test_hybrid_heads as hybrid_heads
from . import test_written_families as families
from . import test_written_hybrids as written

Arrays = dict[str, np.ndarray]
NAMES = ("glm4-moe", "deepseek-v3", "deepseek-v3.2", "glm-4.7-flash", "glm-5", "mimo-v2-flash")
CASES: dict[str, dict[str, Any]] = {
    **{name: dict(written.CASES[name]) for name in ("qwen35", "qwen35moe", "qwen3next")},
    **{name: dict(families.CASES[name][1]) for name in NAMES},
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def tensors(registry: Registry, config: dict[str, Any]) -> tuple[Model, Arrays]:
    """The heads of a model, and random tensors of both."""
    model = registry.model_for(config).load()(config)
    heads = heads_of(model)
    assert heads is not None
    found: Arrays = {}
    for source in (random_weights(heads, 1), random_weights(model)):
        found |= {name: source.part(name).dequantize() for name in source.names()}
    return heads, found


def check(
    heads: Model, arrays: Arrays, found: Model | None, source: WeightSource, most: float
) -> None:
    assert found is not None
    for mine, theirs in zip(found.weights(), heads.weights(), strict=True):
        assert mine.name == theirs.name
        read, wanted = assemble(mine, source)[0], assemble(theirs, ArraySource(arrays))[0]
        np.testing.assert_allclose(read, wanted, rtol=0, atol=most, err_msg=mine.name)


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_heads(registry: Registry, name: str, tmp_path: Path) -> None:
    """Out of safetensors, and out of a file of these."""
    heads, arrays = tensors(registry, CASES[name])
    source = families.saved(tmp_path / "m", CASES[name] | {"vocab_size": 4096}, arrays)
    for kind, most in (("f32", 1e-6), ("q8_0", 0.02)):
        path = tmp_path / f"{kind}.gguf"
        summary = quantize(registry, source, path, kind, threads=1)
        assert not any("prediction" in line or "nextn" in line for line in summary.lost)
        checkpoint = open_checkpoint(registry, path)
        found = heads_of(build_model(registry, checkpoint))
        check(heads, arrays, found, checkpoint.weights, most)
        checkpoint.weights.close()
        source = path


def test_a_file_is_what_the_converter_writes(registry: Registry, tmp_path: Path) -> None:
    family = hybrids.family_of(
        "QWEN3NEXT", hybrid_heads.with_heads, hybrids.with_prediction, hybrids._NEXT, hybrids._QWEN
    )
    config = dict(family.config) | {"vocab_size": 4096, "torch_dtype": "float32"}
    _, arrays = tensors(registry, config)
    arrays = {name: one for name, one in arrays.items() if ".nextn." not in name}
    hybrid_writers.written(tmp_path / "theirs.gguf", family, arrays, GGMLQuantizationType.F32)
    folder = families.saved(tmp_path / "m", config, arrays)
    quantize(registry, folder, tmp_path / "ours.gguf", "f32", threads=1)
    (keys, wanted), (ours, found) = (
        written.contents(tmp_path / f"{one}.gguf") for one in ("theirs", "ours")
    )
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    for key in ("block_count", "nextn_predict_layers"):
        assert ours[f"qwen3next.{key}"] == keys[f"qwen3next.{key}"]
