"""Quantised checkpoints stay quantised in the CPU backend's memory, and the model stays itself."""

from __future__ import annotations

import logging
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.backend import LoadedInfo, LoadOptions
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_testing.plans import Row, make_plan, sampling_rows

from ..null.gguf.models import TYPES, convert_folder, of_type  # noqa: TID252 - no package to name
from . import quantizers
from .quantised_models import CASES, Case, write_pair

REGISTRY = load_registry()
PROMPT = [1, 300, 17, 2040, 991, 5, 5, 812, 3000, 64, 7, 1999, 420, 42, 1234, 2, 88, 900, 33]
BLOCK_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    reason = REGISTRY.get(BackendSpec, "cpu").unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def log_probabilities(path: Path, dtype: str) -> tuple[NDArray[Any], LoadedInfo]:
    """(tokens, 64) of the likeliest ids of each place, by id; and what was loaded."""
    checkpoint = open_checkpoint(REGISTRY, path)
    options = LoadOptions(
        dtype=dtype,
        kv_cache_dtype="f32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_kv_blocks=4,
        num_threads=2,
    )
    model = build_model(REGISTRY, checkpoint)
    with closing(checkpoint.weights):
        loaded = REGISTRY.get(BackendSpec, "cpu").load()().load(model, checkpoint.weights, options)
        with closing(loaded):
            rows = sampling_rows(len(PROMPT), num_logprobs=64)
            plan = make_plan([Row(PROMPT, 0, range(2), "all")], BLOCK_SIZE)
            found = loaded.step(plan, rows).result().logprobs
            assert found is not None
            return np.stack([np.array(found.top_ids), np.array(found.top)]), loaded.info


def check_native(path: Path, stored_bytes: float, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is dequantised, the memory is that of the file, and only the rounding of activations
    lies between the model and its float32 twin."""
    with caplog.at_level(logging.INFO, "vllmx"):
        (ids, native), info = log_probabilities(path, "bf16")
    assert not [r for r in caplog.records if "dequantised" in r.getMessage()]
    assert info.weight_bytes < stored_bytes
    (exact_ids, exact), _ = log_probabilities(path, "f32")
    differences = [
        abs(dict(zip(ids[t], native[t], strict=True)).get(token, np.nan) - value)
        for t in range(len(PROMPT))
        for token, value in zip(exact_ids[t][:8], exact[t][:8], strict=True)
    ]
    assert 0 < np.nanmean(differences) < 0.1
    assert np.mean(ids[:, 0] == exact_ids[:, 0]) > 0.8


@pytest.mark.parametrize("mix", ["q5_1", "q5_0", "q4_1", "q4_k_m", "q3_k_m", "q2_k"])
def test_gguf_mixes(tmp_path: Path, mix: str, caplog: pytest.LogCaptureFixture) -> None:
    summary = quantize(REGISTRY, MODEL_FOLDER, tmp_path / "demo.gguf", mix, threads=2)
    check_native(summary.path, 1.15 * summary.num_bytes, caplog)


def test_gguf_mxfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = convert_folder(MODEL_FOLDER, tmp_path / "demo.gguf", of_type(TYPES.MXFP4))
    check_native(path, 1.15 * path.stat().st_size, caplog)


DEQUANTISED = ("modelopt nvfp4", "mlx 4 bit", "mlx 3 bit")
SAFETENSORS = {name: case for name, case in CASES.items() if name not in DEQUANTISED} | {
    "fp8 blocks": Case(
        partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Embedding and head are bf16 in all of them, and one matrix in memory."""
    folder, _ = write_pair(tmp_path, SAFETENSORS[name])
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table = 4096 * 256 * 4  # float32 in the file
    check_native(folder, 1.4 * (stored - table) + table / 2, caplog)
