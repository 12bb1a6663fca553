"""Runs a checkpoint folder on every backend that is installed here, through the protocols alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows

BLOCK_SIZE = 16
MOST_LOGPROBS = 64
"""What every backend accepts."""


@cache
def registry() -> Registry:
    return load_registry()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend_name" not in metafunc.fixturenames:
        return
    values = []
    for spec in registry().all(BackendSpec):
        reason = spec.unavailable_reason()
        marks = [pytest.mark.skip(reason=f"backend {spec.name}: {reason}")] if reason else []
        values.append(pytest.param(spec.name, marks=marks))
    metafunc.parametrize("backend_name", values)


@dataclass(frozen=True)
class Runner:
    """A loaded model; sequences use the blocks from 0 on, so one call runs at a time."""

    loaded: LoadedModel
    vocab_size: int

    def greedy(self, prompts: Sequence[Sequence[int]], n: int, chunk: int) -> list[list[int]]:
        """`n` ids after each prompt, prefilled in chunks of at most `chunk` tokens."""
        return Driver(self.loaded, chunk=chunk).generate(prompts, n)

    def log_softmax(self, tokens: Sequence[int], chunk: int) -> F32:
        """(T, V) log-probabilities of the next token at every position: all of them where V is at
        most 64, else the 64 likeliest and NaN for the others."""
        top = min(MOST_LOGPROBS, self.vocab_size)
        table = np.full((len(tokens), self.vocab_size), np.nan, np.float32)
        blocks = range(-(-len(tokens) // BLOCK_SIZE))
        for start in range(0, len(tokens), chunk):
            row = Row(tokens[start : start + chunk], start, blocks, "all")
            rows = sampling_rows(len(row.tokens), num_logprobs=top)
            result = self.loaded.step(make_plan([row], BLOCK_SIZE), rows).result()
            assert result.logprobs is not None
            for offset in range(len(row.tokens)):
                ids = result.logprobs.top_ids[offset]
                assert len(set(ids) & set(range(self.vocab_size))) == top
                table[start + offset, ids] = result.logprobs.top[offset]
        return table


RunnerFactory = Callable[..., Runner]


@pytest.fixture
def open_runner(backend_name: str) -> Iterator[RunnerFactory]:
    """open_runner(folder, max_model_len, max_num_seqs=1): the model in float32 throughout."""
    with ExitStack() as stack:

        def open_(folder: Path, max_model_len: int, max_num_seqs: int = 1) -> Runner:
            checkpoint = open_checkpoint(registry(), folder)
            stack.callback(checkpoint.weights.close)
            model = build_model(registry(), checkpoint)
            options = LoadOptions(
                dtype="f32",
                kv_cache_dtype="f32",
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=4096,
                block_size=BLOCK_SIZE,
                num_kv_blocks=max_num_seqs * -(-max_model_len // BLOCK_SIZE),
                num_threads=1,  # small models, and other tests on the other cores
            )
            backend = registry().get(BackendSpec, backend_name).load()()
            loaded = backend.load(model, checkpoint.weights, options)
            stack.enter_context(closing(loaded))
            return Runner(loaded, model.shape.vocab_size)

        yield open_


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, Any]]:
    """build(case): the folder that transformers saved, and its model in float32."""
    from .test_parity_transformers import save_random  # the cases stand there

    built: dict[str, tuple[Path, Any]] = {}

    def build_(case: Any) -> tuple[Path, Any]:
        if case.name not in built:
            folder = tmp_path_factory.mktemp(case.name)
            built[case.name] = (folder, save_random(case, folder))
        return built[case.name]

    return build_
