"""`--expert-parallel` on the CPU backend: every family with experts, and experts in every format,
loaded by ranks that read their own alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, open_checkpoint, quantise_in_situ
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.files import FileRange, WeightFile
from vllmx_core.weights.map import parts_of
from vllmx_core.weights.part import WeightSource
from vllmx_cpu.kinds import native_kind
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

from ..backend.cpu_ranks import cpu_ranks, logits  # noqa: TID252 - no package to name
from .expert_families import FAMILIES, REGISTRY, original
from .test_expert_formats import FORMATS, model_of, published
from .test_mxfp4_experts import folders

__all__ = ["folders"]  # a fixture
pytest.importorskip("safetensors.numpy")
TEXT = [(7 * at * at + 3) % 59 for at in range(20)]
CUTS = (17, 18)
WIDE: dict[str, Any] = FAMILIES["qwen3-moe"].config | {
    "head_dim": 128,
    "moe_intermediate_size": 256,
}
"""Matrices whose parts of 2 ranks are whole blocks of 256 features, but for those of an expert."""


def check(
    model: Model,
    source: WeightSource,
    dtype: str,
    near: float,
    *,
    whole_experts: bool = True,
    deterministic: bool = False,
) -> None:
    """Two ranks compute what one does."""
    how = {"deterministic": deterministic}
    whole = cpu_ranks(model, source, 1, dtype, **how)
    (expected,) = whole.each(lambda loaded: logits(loaded, TEXT, CUTS))
    whole.each(lambda loaded: loaded.close())
    whole.close()
    ranks = cpu_ranks(model, source, 2, dtype, whole_experts=whole_experts, **how)
    first, second = ranks.each(lambda loaded: logits(loaded, TEXT, CUTS))
    ranks.each(lambda loaded: loaded.close())
    ranks.close()
    np.testing.assert_allclose(first, expected, rtol=0, atol=near * np.abs(expected).max())
    np.testing.assert_array_equal(second, first)  # or they would draw different ids


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    check(model_of(family), ArraySource(original(family)), "f32", 2e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_formats_of_safetensors(tmp_path: Path, form: str) -> None:
    folder, _ = published(tmp_path, "olmoe", FORMATS[form])
    checkpoint = open_checkpoint(REGISTRY, folder)
    check(build_model(REGISTRY, checkpoint), checkpoint.weights, "bf16", 0.02)
    checkpoint.weights.close()


@pytest.mark.parametrize("isq", ["q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "int8", "fp8"])
def test_formats_made_while_loading(isq: str) -> None:
    """Blocks of 256 features among them, of which an expert's matrix has one in a row: its columns
    cannot be divided."""
    model: Model = REGISTRY.model_for(WIDE).load()(WIDE)
    checkpoint = Checkpoint(Path("model"), WIDE, random_weights(model))
    source = quantise_in_situ(REGISTRY, checkpoint, model, isq).weights
    if isq.endswith("_k"):
        with pytest.raises(ConfigError, match=r"down.*256 features in units of 256"):
            sharded(model, source, 64, 0, 2)
    check(model, source, "bf16", 0.02)


@pytest.mark.parametrize("deterministic", [False, True])
def test_act_order_in_columns(tmp_path: Path, deterministic: bool) -> None:
    """Each expert's features in the order of its own groups, so that ranks have whole ones."""
    folder, _ = published(tmp_path, "mixtral", FORMATS["gptq"])
    checkpoint = open_checkpoint(REGISTRY, folder)
    model, source = build_model(REGISTRY, checkpoint), checkpoint.weights
    dtype, near = ("bf16", 0.0) if deterministic else ("f32", 2e-5)
    check(model, source, dtype, near, whole_experts=False, deterministic=deterministic)
    (down, *_) = [
        spec
        for spec in sharded(model, source, 64, 1, 2).weights()
        if spec.kind == "stack" and spec.name.endswith("down")
    ]
    assert native_kind(down, source) == "affine4_32"
    assert {part.is_shuffled for one in down.matrices for part in parts_of(one, source)} == {False}
    checkpoint.weights.close()


def test_mxfp4_in_columns(folders: tuple[Path, Path]) -> None:
    """Each rank has one of the two blocks in a row of an expert's second matrix."""
    for folder, dtype, near in ((0, "f32", 2e-5), (0, "bf16", 0.02), (1, "f32", 2e-5)):
        checkpoint = open_checkpoint(REGISTRY, folders[folder])
        model = build_model(REGISTRY, checkpoint)
        check(model, checkpoint.weights, dtype, near, whole_experts=False)
        checkpoint.weights.close()


def test_mxfp4(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts of a layer lie in one tensor, of which each rank reads its own entries: both
    together read as much as one process."""
    checkpoint = open_checkpoint(REGISTRY, folders[0])
    model, source = build_model(REGISTRY, checkpoint), checkpoint.weights
    check(model, source, "bf16", 0.02)
    stacks = [spec for spec in model.weights() if spec.kind == "stack"]
    stored = [
        raw.stored
        for name in {part.name for spec in stacks for part in spec.parts}
        for raw in source.part(name).stored().buffers.values()
    ]
    places = [(one.begin, one.end) for one in stored if isinstance(one, FileRange)]
    assert len(places) == len(stored) == 8  # blocks and scales of two matrices in two layers
    read: list[int] = []
    own = WeightFile.read

    def counted(file: WeightFile, begin: int, end: int, room: Any = None) -> Any:
        read.extend(end - begin for first, last in places if first <= begin and end <= last)
        return own(file, begin, end, room)

    monkeypatch.setattr(WeightFile, "read", counted)
    sums = []
    for ranks in (1, 2):
        read.clear()
        loaded = cpu_ranks(model, source, ranks, "bf16", whole_experts=True)
        sums.append(sum(read))
        loaded.each(lambda one: one.close())
        loaded.close()
    assert sums[1] == sums[0] > 0
    source.close()
