"""Layers of multi-token prediction in GGUF files of hybrids, as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType
from vllmx_core.backend import LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.model import heads_of
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry
from vllmx_core.weights.map import assemble
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load_drafter import hidden_states_for
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

from .hybrid_families import _NEXT, _QWEN, family_of, weights, with_prediction
from .hybrid_writers import LAYERS, Arrays, qwen3_next, rounded, written
from .test_hybrids import registry

__all__ = ["registry"]


HEAD_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def with_heads(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """A whole layer of multi-token prediction, whose norms the converter names before it adds 1."""
    names = gguf.get_tensor_name_map(MODEL_ARCH.QWEN3NEXT, LAYERS + 1)
    mine = {name: values for name, values in arrays.items() if name.startswith("mtp.")}
    yield from qwen3_next({n: a for n, a in arrays.items() if n not in mine}, config)
    for name, values in qwen3_next(mine, config):
        if name in HEAD_NAMES:
            added = name.startswith("mtp.pre_fc")
            yield f"blk.{LAYERS}.{HEAD_NAMES[name]}", values + 1 if added else values
            continue
        ours = name.replace("mtp.layers.0", f"model.layers.{LAYERS}")
        theirs = names.get_name(ours, try_suffixes=(".weight",))
        assert theirs, ours
        yield theirs, values


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_heads_of_a_file_are_those_of_the_original(
    tmp_path: Path, registry: Registry, kind: GGMLQuantizationType
) -> None:
    family = family_of("QWEN3NEXT", with_heads, with_prediction, _NEXT, _QWEN)
    model, arrays = weights(registry, family)
    heads = heads_of(model)
    assert heads is not None
    source = random_weights(heads, 1)
    own = [name for name in source.names() if name.startswith("mtp.")]
    arrays = rounded(arrays | {name: source.part(name).dequantize() for name in own}, kind)
    written(tmp_path / "model.gguf", family, arrays, kind)
    checkpoint = open_checkpoint(registry, tmp_path / "model.gguf")
    found = heads_of(build_model(registry, checkpoint))
    assert found is not None
    assert found.shape.drafts == heads.shape.drafts
    assert found.shape.caches == heads.shape.caches
    for mine, theirs in zip(found.weights(), heads.weights(), strict=True):
        assert mine.name == theirs.name
        read = assemble(mine, checkpoint.weights)[0]
        wanted = assemble(theirs, ArraySource(arrays))[0]
        # Names of the file, which `written` gets here, quantise a few tensors more.
        most = 1e-6 if kind == GGMLQuantizationType.F32 else 1e-2
        np.testing.assert_allclose(read, wanted, rtol=0, atol=most, err_msg=mine.name)
    config = EngineConfig(model="a", speculate="auto")
    engine = FoundModel(config, tmp_path / "model.gguf", registry, progress=False)
    given = (build_model(registry, checkpoint), checkpoint, LoadOptions(), 1 << 30)
    taps, _ = hidden_states_for(engine, *given)
    assert taps is not None
    checkpoint.weights.close()
