"""Shared base of the parts of `BackendSuite`: loads, runs and compares with the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.kv_dtypes import KV_DTYPES
from vllmx_core.model import Model
from vllmx_core.plan import F32, LogprobRows, StepPlan
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.weights.part import WeightSource

from vllmx_testing.plans import Row, make_plan, sampling_rows

VOCAB = 19
"""Vocabulary of most synthetic models: all log-probabilities of a row fit into 20."""
PAGE = 16


class Harness:
    """A subclass says how to make the backend under test."""

    dtype = "f32"
    """The backend's dtype in comparisons with the reference."""
    tolerance = 1e-4
    """Greatest absolute difference of log-probabilities to float64, weights being `dtype`."""
    block_sizes: Collection[int] = (8, 16, 32, 64, 128)
    """Pages that it can have; others of `EngineConfig` must be refused with ConfigError."""
    exact_batches = True
    """A row's bits do not depend on its batch mates nor on chunking."""

    missing_ops: Collection[str] = ()
    """Names of ops that it does not have yet, or of cases ("embedding: token types") whose options
    it lacks: a model that needs one must be refused by name."""

    missing_cases: Collection[str] = ()
    """Cases of ops with an option that it does not have yet: it must refuse them by name too."""

    kv_dtypes: Collection[str] = KV_DTYPES
    """KV caches that it has; others must be refused by name with ConfigError."""
    kv_share = 0.1
    """Greatest error on top of the cache's rounding error; see `kv_dtype_checks`."""

    def make_backend(self) -> Backend:
        """A new backend."""
        raise NotImplementedError("override make_backend in the subclass")

    @contextmanager
    def loaded(self, model: Model, source: WeightSource, **options: Any) -> Iterator[LoadedModel]:
        """The model on the backend under test; closed at the end."""
        loaded = self.make_backend().load(model, source, load_options(self.dtype, options))
        try:
            yield loaded
        finally:
            loaded.close()

    def compare(
        self,
        model: Model,
        source: WeightSource,
        steps: Sequence[Sequence[Row]],
        *,
        tolerance: float | None = None,
        **options: Any,
    ) -> None:
        """Runs the steps on both and compares the log-probabilities of the whole vocabulary at
        every logit row, or the vectors where the model gives such."""
        oracle = ReferenceBackend().load(model, source, load_options("f64", options))
        limit = tolerance or self.tolerance
        with self.loaded(model, source, **options) as loaded:
            for number, rows in enumerate(steps):
                plan = make_plan(rows, loaded.info.block_size)
                expected: Any = oracle.logits(plan)
                if model.shape.output == "tokens":
                    what, expected = "log-probabilities", log_softmax(expected)
                    got = all_logprobs(loaded, plan, model.shape.vocab_size)
                else:
                    what, got = "vectors", all_vectors(loaded, plan)
                np.testing.assert_allclose(
                    got, expected, rtol=0, atol=limit, err_msg=f"{what} of step {number}"
                )

    @staticmethod
    def step_ids(loaded: LoadedModel, rows: Sequence[Row]) -> list[int]:
        """Greedy ids of one step."""
        plan = make_plan(rows, loaded.info.block_size)
        result = loaded.step(plan, sampling_rows(plan.num_logit_rows)).result()
        return [int(token) for token in result.ids]


def all_logprobs(loaded: LoadedModel, plan: StepPlan, vocab_size: int) -> F32:
    """(L, V) log-probabilities of a plan; the vocabulary must be small."""
    rows = sampling_rows(plan.num_logit_rows, num_logprobs=vocab_size)
    return spread(loaded.step(plan, rows).result().logprobs, vocab_size)


def all_vectors(loaded: LoadedModel, plan: StepPlan) -> F32:
    """(L, output_size) of a plan, by a model that gives vectors or scores."""
    result = loaded.step(plan, sampling_rows(0)).result()
    assert result.ids.size == 0, "a model that samples nothing gave ids"
    assert result.vectors is not None, "no vectors came"
    assert result.vectors.dtype == np.float32, f"vectors are {result.vectors.dtype}"
    return result.vectors


def spread(logprobs: LogprobRows | None, vocab_size: int) -> F32:
    """`LogprobRows` with K = V as (L, V) by id."""
    assert logprobs is not None, "logprobs were asked for and did not come"
    assert logprobs.top_ids.shape[1] == vocab_size, "K is not max_logprobs"
    table = np.full(logprobs.top.shape, np.nan, np.float32)
    np.put_along_axis(table, logprobs.top_ids.astype(np.int64), logprobs.top, axis=1)
    return table


def log_softmax(logits: Any) -> Any:
    """The logarithm of the softmax over the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def mixed_steps(seed: int = 0, vocab_size: int = VOCAB, page: int = PAGE) -> list[list[Row]]:
    """Prefill, chunks and decode side by side: four sequences, the second in three chunks that end
    inside pages, the fourth joining later, blocks scattered."""
    random = np.random.default_rng(seed)
    texts = [random.integers(0, vocab_size, length).tolist() for length in (5, 3 * page + 9, 1, 21)]
    blocks = [[7, 2], [3, 11, 0, 9, 14], [5], [1, 12, 13]]
    second = texts[1]

    def row(index: int, start: int, stop: int) -> Row:
        return Row(texts[index][start:stop], start, blocks[index], "all")

    return [
        [row(0, 0, 3), row(1, 0, page + 3), row(2, 0, 1)],
        [row(0, 3, 4), row(1, page + 3, page + 4), row(3, 0, 18)],
        [row(3, 18, 20), row(1, page + 4, 3 * page + 8), row(0, 4, 5)],
        [row(1, len(second) - 1, len(second)), row(3, 20, 21)],
    ]


def load_options(dtype: str, options: dict[str, Any]) -> LoadOptions:
    """The suite's limits, overridden by `options`; f64 asks for the reference whatever they say."""
    defaults: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": PAGE,
        "num_kv_blocks": 64,
        "num_threads": 2,
    }
    overrides = {k: v for k, v in options.items() if not (k == "dtype" and dtype == "f64")}
    return LoadOptions(**(defaults | overrides))
