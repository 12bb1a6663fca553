"""Shared base of the parts of `BackendSuite`: loads, runs and compares with the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.kv_dtypes import KV_DTYPES
from vllmx_core.model import Model
from vllmx_core.plan import F32, LogprobRows, StepPlan
from vllmx_core.recorded.recording import record
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.weights.part import WeightSource

from vllmx_testing.plans import Row, Wanted, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

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
        limit = tolerance or self.tolerance
        with self.loaded(model, source, **options) as loaded:
            size = loaded.info.block_size
            wanted = reference_logits(model, source, steps, size, options)
            for number, (rows, expected) in enumerate(zip(steps, wanted, strict=True)):
                plan = make_plan(rows, size)
                if model.shape.output == "tokens":
                    what, expected = "log-probabilities", log_softmax(expected)
                    got = all_logprobs(loaded, plan, model.shape.vocab_size)
                else:
                    what, got = "vectors", all_vectors(loaded, plan)
                np.testing.assert_allclose(
                    got, expected, rtol=0, atol=limit, err_msg=f"{what} of step {number}"
                )

    def check_chunks(self, model: Model, source: WeightSource, *, end: int) -> None:
        """Asserts equal bits of a text of 400 tokens as a whole and in chunks of 7, `end` - 7 and
        single tokens, with a mate."""
        text = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
        mate = Row([3, 1, 4, 1, 5], 0, [29], "all")
        blocks = list(range(30, 60))
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512}
        with self.loaded(model, source, **limits) as loaded:

            def run(*rows: Row) -> F32:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            whole = run(Row(text, 0, list(range(29)), "all"))
            parts = [run(Row(text[:7], 0, blocks, "all"))]
            parts.append(run(mate, Row(text[7:end], 7, blocks, "all"))[5:])
            parts += [run(Row(text[i : i + 1], i, blocks), mate)[:1] for i in range(end, 400)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    def check_leaks(self, model: Model, source: WeightSource, **options: Any) -> None:
        """Asserts that a row with NaN breaks alone and that the next owner of its blocks sees
        nothing of it."""
        text = np.random.default_rng(5).integers(0, 13, 20).tolist()
        fresh = [[Row(text[:19], 0, [3, 5], "all")], [Row(text[19:], 19, [3, 5])]]
        found = []
        for broken in (True, False):
            with self.loaded(model, with_nan(source), **options) as loaded:
                if broken:
                    ids = self.step_ids(loaded, [Row([13] * 40, 0, [5, 3, 7]), Row([1, 2], 0, [9])])
                    assert ids[0] < 0 <= ids[1]
                found.append([self.step_ids(loaded, rows) for rows in fresh])
        assert found[0] == found[1]

    def lacks(self, op: str, make: Callable[[], tuple[Model, WeightSource]]) -> bool:
        """True for a backend without the op, which a model of `make` needs; then it must say so by
        name."""
        if op not in self.missing_ops:
            return False
        with (
            pytest.raises(UnsupportedOpError, match=f"needs the op '{op}"),
            self.loaded(*make()),
        ):
            pass
        return True

    @staticmethod
    def step_ids(loaded: LoadedModel, rows: Sequence[Row]) -> list[int]:
        plan = make_plan(rows, loaded.info.block_size)
        result = loaded.step(plan, sampling_rows(plan.num_logit_rows)).result()
        return [int(token) for token in result.ids]


_KNOWN: dict[bytes, list[Any]] = {}


def reference_logits(
    model: Model,
    source: WeightSource,
    steps: Sequence[Sequence[Row]],
    block_size: int,
    options: dict[str, Any],
) -> list[Any]:
    """Logits or vectors of each step by the reference in float64. All backends are compared with
    the same ones: a process computes them once for the same ops, weights, rows and options."""
    limits = load_options("f64", options)
    made = record(model, limits.max_model_len)
    asked = (made.steps.ops, made.specs, model.shape, limits, block_size, steps)
    key = hashlib.sha256(repr(asked).encode())
    for name in sorted(source.names()):
        for kind, held in source.part(name).stored().buffers.items():
            key.update(repr((name, kind, held.dtype, held.shape)).encode() + held.data.tobytes())
    for table in made.constants.values():
        key.update(table.tobytes())
    if key.digest() not in _KNOWN:
        oracle = ReferenceBackend().load(model, source, limits)
        _KNOWN[key.digest()] = [oracle.logits(make_plan(rows, block_size)) for rows in steps]
    return _KNOWN[key.digest()]


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


def whole_rows() -> list[list[Row]]:
    """Texts of one step each, for attention without a causal mask."""
    random = np.random.default_rng(1)
    texts = [random.integers(0, VOCAB, length).tolist() for length in (1, 20, 33)]
    rows = [Row(text, 0, [3 * i, 3 * i + 2, 3 * i + 1], "all") for i, text in enumerate(texts)]
    return [rows, rows[:1]]


LONG_CONTEXT: dict[str, Any] = {
    "max_model_len": 1200, "num_kv_blocks": 128, "max_num_batched_tokens": 1024,
}  # fmt: skip
"""Limits for `long_steps`."""


def long_steps(length: int, cut: int, picks: Wanted = "all") -> list[list[Row]]:
    """A text in two chunks, parted at `cut`, and two decodes, next to a row of another one."""
    text, last = np.random.default_rng(2).integers(0, VOCAB, length).tolist(), length - 1
    blocks = np.random.default_rng(3).permutation(72).tolist()
    short = [Row([4], position, [100], "last") for position in range(4)]
    return [
        [Row(text[:cut], 0, blocks, "last"), short[0]],
        [Row(text[cut : last - 1], cut, blocks, picks), short[1]],
        [short[2], Row(text[last - 1 : last], last - 1, blocks)],
        [short[3], Row(text[last:], last, blocks)],
    ]


def with_nan(source: WeightSource) -> ArraySource:
    """The weights with NaN as the embedding of token 13."""
    arrays = {name: np.array(source.part(name).dequantize()) for name in source.names()}
    arrays["embed.weight"][13] = np.nan
    return ArraySource(arrays)


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
