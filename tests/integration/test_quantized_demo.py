"""The demo model in each quantised format of safetensors has the bits of its dequantised twin."""

from __future__ import annotations

import logging
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, Message, SamplingParams
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart, WeightSource
from vllmx_demo.source import MODEL_FOLDER
from vllmx_testing.plans import Row, make_plan, sampling_rows

from .quantised_models import CASES, REGISTRY, Array, write_pair

PROMPT = [1, 300, 17, 2040, 991, 5, 5, 812, 3000, 64, 7, 1999, 420, 42, 1234, 2, 88, 900, 33]
BLOCK_SIZE = 16
TOP = 64


NATIVE = {"metal"}
"""Backends that multiply some of these as they are: the sums have another order than the twin's."""


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


class WatchedPart(StoredPart):
    watch: Callable[[Array], None]

    def dequantize(self, begin: int = 0, end: int | None = None) -> Array:
        values = super().dequantize(begin, end)
        self.watch(values)
        return values


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
        if not isinstance(part, StoredPart) or part.layout == DENSE:
            return part
        return WatchedPart(part.name, part.shape, part.layout, part.buffers, self._watch)

    def _watch(self, values: Array) -> None:
        self.decoded.append(weakref.ref(values))
        self.total += values.size
        self.most_alive = max(self.most_alive, self.alive())

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

    quantised, _ = write_pair(tmp_path, CASES["modelopt nvfp4"])
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
