"""GGUF files of hybrids are read as the models that they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_testing.synthetic import ArraySource

from .hybrid_families import FAMILIES, weights
from .hybrid_writers import Family, lfm_header, rounded, written
from .test_recurrent import logits


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_read_as_the_model_that_they_hold(
    tmp_path: Path, registry: Registry, name: str, kind: GGMLQuantizationType
) -> None:
    family = FAMILIES[name]
    model, arrays = weights(registry, family)
    arrays = rounded(arrays, kind)
    written(tmp_path / "model.gguf", family, arrays, kind)
    checkpoint = open_checkpoint(registry, tmp_path / "model.gguf")
    expected = logits(model, ArraySource(arrays))
    found = logits(build_model(registry, checkpoint), checkpoint.weights)
    checkpoint.weights.close()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_what_a_file_cannot_mean_is_refused(tmp_path: Path, registry: Registry) -> None:
    family = FAMILIES["lfm2moe"]
    _, arrays = weights(registry, family)

    def header(change: Callable[[GGUFWriter], None]) -> Family:
        def make(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
            lfm_header(writer, config)
            change(writer)

        return Family(family.arch, family.config, family.tensors, make)

    changes: dict[str, tuple[type[Exception], Callable[[GGUFWriter], None]]] = {
        "differs from layer to layer": (
            UnsupportedModelError,
            lambda writer: writer.add_head_count_kv([0, 2, 4, 0]),
        ),
        "must be 4 integers of at least 0": (
            WeightFormatError,
            lambda writer: writer.add_head_count_kv([0, 2]),
        ),
        "must be 2, sigmoid": (
            WeightFormatError,
            lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
        ),
    }
    for number, (message, (error, change)) in enumerate(changes.items()):
        path = tmp_path / f"{number}.gguf"
        written(path, header(change), arrays, GGMLQuantizationType.F32)
        with pytest.raises(error, match=message):
            open_checkpoint(registry, path)
