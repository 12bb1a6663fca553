"""Experts in the quantised formats of safetensors, each tensor an expert: the answer is that of the
values that the tensors mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.plugins.registry import load_registry
from vllmx_testing.model_suite import random_weights

from .quantised_models import CASES, Case, write_model
from .test_quantised_experts import CONFIG, logprobs

REGISTRY = load_registry()
CHECKED = (
    "gptq 4 bit act-order",
    "awq",
    "w4a16",
    "compressed-tensors fp8",
    "fp8 blocks",
    "modelopt nvfp4",
)
Pair = tuple[Path, Path]


def write_pair(folder: Path, case: Case) -> Pair:
    """A Qwen3-MoE with quantised matrices, and its twin with the float32 values they mean."""
    source = random_weights(REGISTRY.model_for(CONFIG).load()(CONFIG))
    quantised: dict[str, Any] = {}
    twin: dict[str, Any] = {}
    for name in source.names():
        values = source.part(name).dequantize() * (20 if "embed_tokens" in name else 1)
        module = name.removesuffix(".weight")
        if "_proj" not in module:
            quantised[name] = twin[name] = values
            continue
        tensors, twin[name] = case.quantise(values)
        quantised |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
    written = CONFIG | {"quantization_config": case.config}
    return (
        write_model(folder / "quantised", quantised, written),
        write_model(folder / "twin", twin, CONFIG),
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {
        name: write_pair(tmp_path_factory.mktemp(name.replace(" ", "-")), CASES[name])
        for name in CHECKED
    }


@pytest.mark.parametrize("backend", ["cpu", "metal", "torch"])
@pytest.mark.parametrize("name", CHECKED)
def test_the_answer_is_that_of_the_values(pairs: dict[str, Pair], name: str, backend: str) -> None:
    found, wanted = (logprobs(folder, backend=backend) for folder in pairs[name])
    shared = sorted(set(found) & set(wanted))
    assert len(shared) >= 15
    assert np.abs([found[token] - wanted[token] for token in shared]).max() < 1e-3
