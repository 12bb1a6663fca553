"""Quantised checkpoints cut among ranks: every format, in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint, quantise_in_situ
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.map import parts_of
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.views import share_of
from vllmx_demo.source import MODEL_FOLDER
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from ..backend.test_cpu_rank_formats import fp8_blocks  # noqa: TID252 - no package to name
from . import quantizers
from .quantised_models import CASES, REGISTRY, Case, write_pair

TEXT = [5, 900, 17, 3000, 42, 8]
NARROW_BLOCKS = Case(
    partial(quantizers.fp8, block=(128, 64), name="weight_scale_inv"),
    {"quant_method": "fp8", "weight_block_size": [128, 64]},
)
"""Two ranks have whole blocks of columns; their head of 64 rows each of keys is half of a block."""
LIMITS = {"dtype": "f32", "max_model_len": 16, "max_num_seqs": 1, "num_kv_blocks": 1}
TOO_WIDE = {"fp8 blocks": 96}
"""Blocks of so many columns do not go into two heads of 64."""


def logits(loaded: ReferenceLoadedModel) -> F32:
    found: F32 = loaded.logits(make_plan([Row(TEXT, 0, [0], "all")], 16))
    return found


def check(checkpoint: Checkpoint, ranks: int) -> None:
    """All ranks together compute what one does, and multiply the same layouts."""
    model: Model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    source = checkpoint.weights
    expected = logits(ReferenceBackend().load(model, source, LoadOptions(**LIMITS)))  # type: ignore[arg-type]

    def load(end: ThreadCommunicator) -> ReferenceLoadedModel:
        mine = sharded(model, source, 16, end.rank, ranks)
        limits = LoadOptions(**LIMITS, communicator=end)  # type: ignore[arg-type]
        return ReferenceBackend().load(mine, source, limits)

    threads = RankThreads(ranks, load)
    for found in threads.each(logits):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    threads.close()


def layouts(checkpoint: Checkpoint) -> set[str]:
    """What a rank's matrices of one layer are stored as."""
    model: Model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    specs = [s for s in sharded(model, checkpoint.weights, 16, 1, 2).weights() if s.cols]
    return {
        part.layout.kind
        for spec in specs
        if spec.name.startswith("layers.3.")
        for part in parts_of(spec, checkpoint.weights)
    }


@pytest.mark.parametrize("name", [*CASES, "fp8 narrow blocks"])
def test_formats_of_safetensors(name: str, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, CASES.get(name, NARROW_BLOCKS))
    checkpoint = open_checkpoint(REGISTRY, folder)
    if name in TOO_WIDE:
        with pytest.raises(ConfigError, match=r"units of 384 .* choose --tensor-parallel-size 1$"):
            check(checkpoint, 2)
    else:
        check(checkpoint, 2)
        assert name.startswith(("modelopt", "compressed")) or "dense" not in layouts(checkpoint)
    checkpoint.weights.close()


def test_rows_of_blocks() -> None:
    """Whatever rows of its part a backend asks for, and wherever those of the rank begin."""
    part = fp8_blocks("w", (512, 384), np.random.default_rng(3))
    whole = part.dequantize()
    for runs, height in ((((128, 384),), 128), (((64, 320), (448, 512)), 64)):
        share = share_of(part, RankShare(512, 384, runs, (128, 384)))
        expected = np.concatenate([whole[slice(*run), 128:] for run in runs])
        assert share.layout.options["block_rows"] == height
        np.testing.assert_array_equal(share.dequantize(), expected)
        whole_share = share.stored()
        np.testing.assert_array_equal(whole_share.dequantize(), expected)
        for first, last in ((0, 1), (5, 70), (100, 200), (250, len(expected))):
            rows = share.rows(first, last)
            assert rows.buffers["weight"].shape == (last - first, 256)
            np.testing.assert_array_equal(rows.dequantize(), expected[first:last])


@pytest.mark.parametrize("isq", ["q8_0", "q4_0", "int8"])
def test_formats_made_while_loading(isq: str) -> None:
    opened = open_checkpoint(REGISTRY, MODEL_FOLDER)
    model: Model = REGISTRY.model_for(opened.config).load()(opened.config)
    checkpoint = quantise_in_situ(REGISTRY, opened, model, isq)
    check(checkpoint, 2)
    assert layouts(checkpoint) == {"int8" if isq == "int8" else "gguf"}
    opened.weights.close()


def test_blocks_that_are_wider_than_a_rank() -> None:
    opened = open_checkpoint(REGISTRY, MODEL_FOLDER)
    model: Model = REGISTRY.model_for(opened.config).load()(opened.config)
    checkpoint = quantise_in_situ(REGISTRY, opened, model, "q4_k")
    with pytest.raises(ConfigError, match=r"layers.5.o.*256 features in units of 256 .* 1 ranks"):
        sharded(model, checkpoint.weights, 16, 0, 2)
    opened.weights.close()
