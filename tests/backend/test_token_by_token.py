"""`--deterministic` on backends whose libraries choose the order of sums by shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.backend_kit.token_by_token import TokenByToken
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.weights.part import WeightSource
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, all_vectors
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.sampler_checks import SamplerChecks
from vllmx_testing.state_checks import StateChecks
from vllmx_testing.step_checks import StepChecks, decoder
from vllmx_testing.vector_checks import VectorChecks, text_model

from tests.usable_backends import backend_spec

EXACT = (
    "test_bits_do_not_depend_on_batch_mates",
    "test_cache_groups_do_not_feel_their_batch",
    "test_a_row_does_not_depend_on_other_adapters",
    "test_bits_of_latents_do_not_depend_on_chunks",
)
"""Checks of the suite that backends with the attribute `exact_batches` pass."""


class TokenByTokenHarness(Harness):
    """A backend that computes each token alone."""

    backend = "torch"

    def make_backend(self) -> Backend:
        backend: Backend = backend_spec(self.backend).load()()
        return backend

    @contextmanager
    def loaded(self, model: Model, source: WeightSource, **options: Any) -> Iterator[LoadedModel]:
        with super().loaded(model, source, **options) as loaded:
            yield TokenByToken(loaded, whole_rows=model.shape.whole_prompts)


class _Alone(TokenByTokenHarness, BackendSuite):
    """Batches are exact then."""

    def __init__(self, backend: str, dtype: str) -> None:
        self.backend, self.dtype = backend, dtype


@pytest.mark.parametrize("check", EXACT)
def test_bits_do_not_depend_on_the_batch(check: str) -> None:
    getattr(_Alone("numpy", "f32"), check)()


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "f32"), ("torch", "bf16"), ("metal", "f32"), ("metal", "bf16")]
)
def test_chunks_and_mates_change_no_bit(backend: str, dtype: str) -> None:
    """On libraries for which the suite's long texts would take a minute."""
    check_bits(_Alone(backend, dtype))


def check_bits(harness: Harness) -> None:
    """Asserts equal bits of a text as a whole and in chunks among others."""
    text, blocks = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 4]
    mates = [Row([7, 7, 2], 0, [20]), Row([5], 0, [21]), Row([8, 1], 0, [22])]
    with harness.loaded(*decoder()) as loaded:

        def run(*rows: Row) -> Any:
            return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

        whole = run(Row(text, 0, [0, 1], "all"))
        parts = [run(Row(text[:4], 0, blocks, "all"), *mates)[:4]]
        parts.append(run(*mates, Row(text[4:5], 4, blocks, "all"))[3:])
        parts.append(run(mates[0], Row(text[5:], 5, blocks, "all"), mates[1])[1:-1])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


class TestSteps(TokenByTokenHarness, StepChecks, SamplerChecks, StateChecks, VectorChecks):
    """Steps, sampling and states are what they are in a batch."""

    backend = "numpy"

    def native(self, dtype: str) -> dict[str, Any]:
        return {"dtype": "f32"}


@pytest.mark.parametrize("backend", ["numpy", "torch", "metal"])
def test_an_answer_is_the_same_in_any_batch(backend: str) -> None:
    """Through the engine: chunks, a prefix hit, mates and drafts change no bit."""
    prompts = [f"Once upon a time there was a {one}" for one in ("cat", "big dog", "fox who ran")]
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=3, logprobs=4, ignore_eos=True)
    found = []
    for sizes in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "speculate": "ngram"}):
        with LLM("demo", backend=backend, deterministic=True, num_kv_blocks=64, **sizes) as llm:
            for texts in (prompts, prompts[::-1]):  # the second time from the prefix cache
                outputs = llm.generate(texts, params, use_tqdm=False)
                found.append({one.prompt: one.outputs[0] for one in outputs})
    for other in found[1:]:
        for prompt in prompts:
            assert other[prompt].token_ids == found[0][prompt].token_ids
            for left, right in zip(other[prompt].logprobs, found[0][prompt].logprobs, strict=True):
                values = [{key: one.logprob for key, one in each.items()} for each in (left, right)]
                assert values[0] == values[1]


def test_rows_that_are_computed_whole() -> None:
    texts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    rows = [Row(text, 0, [number]) for number, text in enumerate(texts)]
    with Harness.loaded(_Alone("torch", "f32"), *text_model()) as model:
        loaded = TokenByToken(model, whole_rows=True)
        together = all_vectors(loaded, make_plan(rows, PAGE))
        alone = [all_vectors(loaded, make_plan([row], PAGE)) for row in reversed(rows)]
    np.testing.assert_array_equal(together, np.concatenate(alone[::-1]))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'torch', where sums over ranks .* --backend cpu, or"):
        LLM("demo", backend="torch", deterministic=True, tensor_parallel_size=2)
