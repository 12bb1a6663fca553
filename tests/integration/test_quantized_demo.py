"""The demo model in each quantised format of safetensors has the bits of its dequantised twin."""

from __future__ import annotations

import json
import logging
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from vllmx import LLM, Message, SamplingParams
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.checkpoint import build_model, open_checkpoint
from vllmx_core.registry import load_registry
from vllmx_core.specs import BackendSpec
from vllmx_core.testing.plans import Row, make_plan, sampling_rows
from vllmx_core.weights import WeightPart, WeightSource
from vllmx_demo.source import MODEL_FOLDER

from . import quantizers
from .quantizers import Quantised, ct_config

Array = NDArray[Any]
REGISTRY = load_registry()
PROMPT = [1, 300, 17, 2040, 991, 5, 5, 812, 3000, 64, 7, 1999, 420, 42, 1234, 2, 88, 900, 33]
BLOCK_SIZE = 16
TOP = 64


@dataclass(frozen=True)
class Case:
    quantise: Callable[[Array], Quantised]
    config: dict[str, Any]


GPTQ = {"quant_method": "gptq", "sym": False}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
CASES = {
    "gptq 4 bit act-order": Case(
        partial(quantizers.gptq, bits=4, group_size=64, shuffled=True, v2=False),
        {**GPTQ, "bits": 4, "group_size": 64, "desc_act": True},
    ),
    "gptq 3 bit v2": Case(
        partial(quantizers.gptq, bits=3, group_size=128, shuffled=False, v2=True),
        {**GPTQ, "bits": 3, "group_size": 128, "checkpoint_format": "gptq_v2"},
    ),
    "awq": Case(
        partial(quantizers.awq, group_size=64),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
    ),
    "w4a16": Case(
        partial(quantizers.pack_quantized, bits=4, group_size=32),
        ct_config({"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}),
    ),
    "w8a8": Case(
        quantizers.int8,
        ct_config(
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "dynamic": True, "strategy": "token"},
        ),
    ),
    "compressed-tensors fp8": Case(
        partial(quantizers.fp8, block=(1, 4096), name="weight_scale"), ct_config(FLOAT8)
    ),
    "fp8 blocks": Case(
        partial(quantizers.fp8, block=(128, 96), name="weight_scale_inv"),  # 96 leaves edges
        {"quant_method": "fp8", "weight_block_size": [128, 96]},
    ),
    "modelopt fp8": Case(
        partial(quantizers.fp8, block=(4096, 4096), name="weight_scale", whole=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    ),
    "modelopt nvfp4": Case(
        quantizers.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    ),
    "mlx 4 bit": Case(
        partial(quantizers.mlx_affine, bits=4, group_size=64),
        {"group_size": 64, "bits": 4, "mode": "affine"},
    ),
    "mlx 3 bit": Case(
        partial(quantizers.mlx_affine, bits=3, group_size=32), {"group_size": 32, "bits": 3}
    ),
}
NATIVE = {"metal"}
"""Backends that multiply some of these as they are: the sums have another order than the twin's."""


@cache
def demo_tensors() -> dict[str, Array]:
    source = open_checkpoint(REGISTRY, MODEL_FOLDER).weights
    return {name: source.part(name).dequantize() for name in source.names()}


def write_pair(folder: Path, case: Case) -> tuple[Path, Path]:
    """The quantised checkpoint and its twin with the float32 values that it means."""
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    quantised: dict[str, Array] = {}
    twin: dict[str, Array] = {}
    for name, weight in demo_tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" not in module:
            quantised[name] = twin[name] = weight
            continue
        tensors, twin[name] = case.quantise(weight)
        quantised.update({f"{module}.{suffix}": value for suffix, value in tensors.items()})
    written = {**config, "quantization_config": case.config}
    return (
        write_model(folder / "quantised", quantised, written),
        write_model(folder / "twin", twin, {**config, "torch_dtype": "float32"}),
    )


def write_model(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_FOLDER / file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("quantised")
    yield write_pair(folder, CASES[request.param])
    shutil.rmtree(folder)


def log_probabilities(folder: Path, backend: str) -> tuple[Array, Array]:
    """Ids and log-probabilities of the likeliest tokens after each token of the prompt."""
    checkpoint = open_checkpoint(REGISTRY, folder)
    options = LoadOptions(
        dtype="f32",
        kv_cache_dtype="f32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_kv_blocks=4,
        num_threads=1,
    )
    with closing(checkpoint.weights):
        model = build_model(REGISTRY, checkpoint)
        loaded: LoadedModel = (
            REGISTRY.get(BackendSpec, backend).load()().load(model, checkpoint.weights, options)
        )
        with closing(loaded):
            rows = sampling_rows(len(PROMPT), num_logprobs=TOP)
            plan = make_plan([Row(PROMPT, 0, range(2), "all")], BLOCK_SIZE)
            logprobs = loaded.step(plan, rows).result().logprobs
            assert logprobs is not None
            return np.array(logprobs.top_ids), np.array(logprobs.top)


@cache
def demo_log_probabilities(backend: str) -> Array:
    return log_probabilities(MODEL_FOLDER, backend)[1]


def backends() -> list[Any]:
    found = []
    for spec in REGISTRY.all(BackendSpec):
        reason = spec.unavailable_reason()
        marks = [pytest.mark.skip(reason=f"backend {spec.name}: {reason}")] if reason else []
        found.append(pytest.param(spec.name, marks=marks))
    return found


@pytest.mark.parametrize("backend", backends())
def test_logits_are_those_of_the_dequantised_twin(
    pair: tuple[Path, Path], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, twin = pair
    with caplog.at_level(logging.INFO, "vllmx"):
        ids, values = log_probabilities(quantised, backend)
    twin_ids, twin_values = log_probabilities(twin, backend)
    if backend in NATIVE:  # sorted by value, so near ties may swap their ids
        np.testing.assert_allclose(values, twin_values, rtol=0, atol=2e-4)
        np.testing.assert_array_equal(ids[:, 0], twin_ids[:, 0])
    else:
        np.testing.assert_array_equal(ids, twin_ids)
        np.testing.assert_array_equal(values, twin_values)
    original = demo_log_probabilities(backend)
    assert 1e-4 < np.abs(values[:, 0] - original[:, 0]).max() < 5  # quantised, and still that model
    if backend == "cpu":
        lines = [r.getMessage() for r in caplog.records if "dequantised" in r.getMessage()]
        assert len(lines) == 1
        assert "42 matrices" in lines[0]  # 7 in each of 6 layers


class Watched:
    """A source that counts the decoded values that are alive when more are decoded."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.decoded: list[weakref.ref[Array]] = []
        self.total = 0
        self.most_alive = 0

    def names(self) -> Collection[str]:
        return self.source.names()

    def part(self, name: str) -> WeightPart:
        part = self.source.part(name)
        decode = part.decode
        if decode is None:
            return part

        def watched(part: WeightPart, begin: int, end: int) -> Array:
            values = decode(part, begin, end)
            self.decoded.append(weakref.ref(values))
            self.total += values.size
            self.most_alive = max(self.most_alive, self.alive())
            return values

        return replace(part, decode=watched)

    def alive(self) -> int:
        arrays = (reference() for reference in self.decoded)
        return sum(values.size for values in arrays if values is not None)

    def close(self) -> None:
        self.source.close()


def test_the_cpu_backend_drops_what_it_packed(tmp_path: Path) -> None:
    reason = REGISTRY.get(BackendSpec, "cpu").unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    from vllmx_cpu.packing import ROWS_AT_ONCE

    quantised, _ = write_pair(tmp_path, CASES["w8a8"])
    checkpoint = open_checkpoint(REGISTRY, quantised)
    model, watched = build_model(REGISTRY, checkpoint), Watched(checkpoint.weights)
    options = LoadOptions(max_model_len=64, num_kv_blocks=4, num_threads=1)
    backend = REGISTRY.get(BackendSpec, "cpu").load()()
    with closing(watched), closing(backend.load(model, watched, options)):
        linears = ("qkv", "o", "gate_up", "down")
        matrices = [spec for spec in model.weights() if spec.name.split(".")[-1] in linears]
        assert watched.total == sum(spec.rows * spec.cols for spec in matrices)
        widest = max(spec.cols for spec in matrices)
        assert watched.most_alive <= 2 * ROWS_AT_ONCE * widest
        assert watched.alive() == 0


@pytest.mark.parametrize("name", ["gptq 4 bit act-order", "fp8 blocks"])
def test_a_quantised_model_answers(tmp_path: Path, name: str) -> None:
    quantised, twin = write_pair(tmp_path, CASES[name])
    question = [Message("user", "What is the capital of France?")]
    texts = []
    for folder in (quantised, twin):
        with LLM(str(folder), max_num_seqs=4, kv_cache_memory_bytes=1 << 24) as llm:
            (output,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24))
            texts.append(output.outputs[0].text)
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
