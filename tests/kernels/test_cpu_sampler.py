"""The native sampler against `vllmx_core.reference.sampler`, id by id, and its distribution."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.plan import F32, I32, AnyArray, LogitEdits, SamplingRows, StepResult, TokenCounts
from vllmx_core.reference.sampler import kept, sample, tempered
from vllmx_core.sampling import gumbel_noise
from vllmx_cpu.memory import allocate
from vllmx_cpu.native import Isa, library
from vllmx_cpu.sampling import SamplerCall
from vllmx_cpu.structs import VxStep

RunOp = Callable[[Isa, str, ctypes.Structure, VxStep, int], None]
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "temperature": (np.float32, 1),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "frequency_penalty": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "seed": (np.uint64, 5),
    "position": (np.int32, 9),
    "target": (np.int32, -1),
    "num_logprobs": (np.int32, -1),
}


def make_rows(count: int, **given: Any) -> SamplingRows:
    """Rows of the given values (one for all or one each), the rest off."""
    columns: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(given.pop(name, default), dtype), (count,)).copy()
        for name, (dtype, default) in DEFAULTS.items()
    }
    if "max_logprobs" not in given:
        given["max_logprobs"] = int(columns["num_logprobs"].max(initial=-1))
    return SamplingRows(**columns, **given)


def native_sample(
    run_op: RunOp, isa: Isa, logits: F32, rows: SamplingRows, fed: I32, threads: int = 1
) -> StepResult:
    """What `sample` does, by the kernel; its workspace starts as NaN."""
    count, vocab_size = logits.shape
    workspace = allocate(library().vx_sampler_workspace_bytes(vocab_size, threads))
    workspace[:] = 0xFF
    call = SamplerCall(rows)
    call.bind(logits.ctypes.data, vocab_size, workspace)
    every = np.arange(count, dtype=np.int32)
    step = VxStep(T=count, L=count, tokens=fed.ctypes.data, logit_rows=every.ctypes.data)
    before = logits.copy()
    run_op(isa, "sample", call.struct, step, threads)
    np.testing.assert_array_equal(logits, before)
    return call.result(0.0)


def assert_same(got: StepResult, want: StepResult, rows: SamplingRows) -> None:
    np.testing.assert_array_equal(got.ids, want.ids, err_msg=str(rows))
    if want.logprobs is None:
        assert got.logprobs is None
        return
    assert got.logprobs is not None
    np.testing.assert_array_equal(got.logprobs.rank, want.logprobs.rank)
    np.testing.assert_array_equal(got.logprobs.top_ids, want.logprobs.top_ids)
    for name in ("chosen", "top"):
        np.testing.assert_allclose(
            getattr(got.logprobs, name), getattr(want.logprobs, name), rtol=2e-6, atol=2e-6
        )


# --- everything at once -------------------------------------------------------------------------
def ragged_ids(rng: np.random.Generator, count: int, vocab_size: int, most: int) -> tuple[I32, I32]:
    """(start, ids): up to `most` ids a row, unique within it."""
    lengths = rng.integers(0, min(most, vocab_size) + 1, count)
    start = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    parts = [rng.permutation(vocab_size)[:length] for length in lengths]
    return start, np.concatenate(parts).astype(np.int32)


def random_rows(rng: np.random.Generator, count: int, vocab_size: int) -> SamplingRows:
    edit_start, edit_ids = ragged_ids(rng, count, vocab_size, 30)
    count_start, count_ids = ragged_ids(rng, count, vocab_size, 50)
    words = (2, (vocab_size + 31) // 32)
    masks = rng.integers(0, 1 << 32, words, np.uint32) & rng.integers(0, 1 << 32, words, np.uint32)
    return make_rows(
        count,
        temperature=rng.choice([0, 0.3, 1, 2.5, 1e-4, 50], count),
        top_k=rng.choice([0, 1, 5, 40, vocab_size // 2, vocab_size, 2 * vocab_size], count),
        top_p=rng.choice([1, 0.9, 0.5, 0.05, 0.999], count),
        min_p=rng.choice([0, 0.05, 0.5, 1e-6], count),
        repetition_penalty=rng.choice([1, 1.3, 0.7], count),
        frequency_penalty=rng.choice([0, 0.5, -1], count),
        presence_penalty=rng.choice([0, 1.5, -0.4], count),
        seed=rng.integers(0, 1 << 64, count, np.uint64),
        position=rng.integers(0, 1 << 20, count),
        target=np.where(rng.random(count) < 0.1, rng.integers(0, vocab_size, count), -1),
        num_logprobs=rng.choice([-1, 0, 1, 5, 20], count),
        max_logprobs=20,
        edits=LogitEdits(
            edit_start,
            edit_ids,
            rng.choice([1.5, -3, -np.inf, 100], len(edit_ids)).astype(np.float32),
        ),
        counts=TokenCounts(
            count_start,
            count_ids,
            rng.choice([0, 1, 2, 7], len(count_ids)).astype(np.int32),
            rng.random(count) < 0.5,
        ),
        mask_index=rng.choice([-1, 0, 1], count).astype(np.int32),
        masks=masks,
        group_from=rng.choice([-1, -1, vocab_size // 2 or -1], count).astype(np.int32),
    )


def random_logits(rng: np.random.Generator, count: int, vocab_size: int) -> F32:
    """Sharp, flat, shifted; with ties, NaN and -inf."""
    spread, shift = rng.choice([0.01, 1, 4]), rng.choice([0, -30, 100])
    logits: F32 = (rng.standard_normal((count, vocab_size)) * spread + shift).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.2:
        logits[0, rng.integers(vocab_size)] = rng.choice([np.nan, np.inf])
    if rng.random() < 0.2:
        logits[-1, rng.integers(vocab_size)] = -np.inf
    return logits


@pytest.mark.parametrize("seed", range(30))
def test_all_features_mixed(run_op: RunOp, isa: Isa, seed: int) -> None:
    """Exact ids against the reference; 1, 2 and 5 threads agree to the bit, logprobs included."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([1, 2, 5, 17, 100, 1000, 4096, 4097, 9001, 20011]))
    count = int(rng.integers(1, 7))
    logits, rows = random_logits(rng, count, vocab_size), random_rows(rng, count, vocab_size)
    fed = rng.integers(0, vocab_size, count).astype(np.int32)
    alone = native_sample(run_op, isa, logits, rows, fed)
    assert_same(alone, sample(logits, rows, fed), rows)
    for threads in (2, 5):
        shared = native_sample(run_op, isa, logits, rows, fed, threads)
        np.testing.assert_array_equal(shared.ids, alone.ids)
        assert alone.logprobs is not None
        assert shared.logprobs is not None
        np.testing.assert_array_equal(shared.logprobs.chosen, alone.logprobs.chosen)
        np.testing.assert_array_equal(shared.logprobs.top, alone.logprobs.top)


def test_real_vocabulary_size(run_op: RunOp, isa: Isa) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((6, 151_936)) * 3).astype(np.float32)
    rows = make_rows(
        6,
        temperature=[0, 1, 0.6, 1, 1.5, 100],
        top_k=[0, 0, 20, 50_000, 0, 0],
        top_p=[1, 1, 0.95, 0.999, 0.9, 0.5],
        position=range(6),
        num_logprobs=5,
    )
    fed = np.zeros(6, np.int32)
    assert_same(native_sample(run_op, isa, logits, rows, fed), sample(logits, rows, fed), rows)


def test_a_row_does_not_depend_on_the_others(run_op: RunOp, isa: Isa) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((7, 5003)).astype(np.float32)
    columns: dict[str, list[float]] = {
        "temperature": [1, 0, 2, 1, 0.5, 1, 1],
        "top_k": [0, 0, 9, 50, 0, 1, 0],
        "top_p": [0.9, 1, 1, 0.5, 0.8, 1, 1],
        "position": [*range(7)],
    }
    fed = np.zeros(7, np.int32)
    together = native_sample(run_op, isa, logits, make_rows(7, **columns), fed, 2)
    logits[3, 17] = np.nan  # and a broken neighbour disturbs nobody
    for row in range(7):
        mine = make_rows(1, **{name: values[row] for name, values in columns.items()})
        alone = native_sample(run_op, isa, logits[row : row + 1].copy(), mine, fed, 2)
        assert alone.ids[0] == (-1 if row == 3 else together.ids[row])


# --- the edges ----------------------------------------------------------------------------------
def test_nothing_allowed_and_broken_rows(run_op: RunOp, isa: Isa) -> None:
    logits = np.zeros((4, 40), np.float32)
    logits[1, 39], logits[2] = np.nan, -np.inf
    rows = make_rows(
        4,
        temperature=[0, 1, 1, 1],
        target=[-1, 3, -1, 4],
        num_logprobs=2,
        mask_index=np.array([0, -1, -1, 0], np.int32),
        masks=np.zeros((1, 2), np.uint32),
    )
    got = native_sample(run_op, isa, logits, rows, np.zeros(4, np.int32))
    assert got.ids.tolist() == [-1, -1, -1, 4]  # a scored row has no mask
    assert_same(got, sample(logits, rows, np.zeros(4, np.int32)), rows)


def test_ties_at_the_edge_stay(run_op: RunOp, isa: Isa) -> None:
    """top_k 2 of [2, 1, 1, 1, 0] keeps four; top_p 0.5 of four equals keeps all of them."""
    ranked = np.array([[2, 1, 1, 1, 0]], np.float32)
    equal = np.array([[0, 0, 0, 0, -9]], np.float32)
    assert kept(ranked[0] - 2, 0, 2, 1).tolist() == [True, True, True, True, False]
    assert kept(equal[0], 0, 0, 0.5).tolist() == [True, True, True, True, False]
    fed = np.zeros(1, np.int32)
    for logits, parameters in ((ranked, {"top_k": 2}), (equal, {"top_p": 0.5})):
        drawn = set()
        for position in range(200):
            rows = make_rows(1, temperature=2, position=position, **parameters)
            drawn |= set(native_sample(run_op, isa, logits, rows, fed).ids.tolist())
        assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0, 0, 0.9), (0, 30, 1), (0, 0, 0.01), (0.5, 0, 1), (0.4, 1200, 0.8), (0, 900, 0.99)],
)
def test_the_draw_reaches_what_the_filters_keep_and_no_more(
    run_op: RunOp, isa: Isa, min_p: float, top_k: int, top_p: float
) -> None:
    """Nearly equal probabilities, so that 2,048 draws come close to the edge of what is kept;
    logits 2^-8 apart, so that the edge does not hang on a rounding."""
    draws, vocab_size, temperature = 2048, 1500, 5.0
    logits = (np.random.default_rng(11).permutation(vocab_size) / 256).astype(np.float32)
    keep = kept(tempered(logits, temperature), min_p, top_k, top_p)
    rows = make_rows(
        draws,
        temperature=temperature,
        min_p=min_p,
        top_k=top_k,
        top_p=top_p,
        position=np.arange(draws),
    )
    every, fed = np.repeat(logits[None], draws, 0), np.zeros(draws, np.int32)
    got = native_sample(run_op, isa, every, rows, fed, 2)
    np.testing.assert_array_equal(got.ids, sample(every, rows, fed).ids)
    drawn = np.unique(got.ids)
    assert keep[drawn].all()
    edge = np.argsort(np.where(keep, logits, np.inf))[: max(1, int(keep.sum()) // 20)]
    assert np.isin(edge, drawn).any()


# --- the distribution ---------------------------------------------------------------------------
def chi_square(observed: AnyArray, expected: AnyArray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str
)
def test_draws_follow_the_softmax(run_op: RunOp, isa: Isa, parameters: dict[str, float]) -> None:
    """Chi-square over 4,096 draws that differ in seed or position alone."""
    draws, vocab_size = 4096, 12
    logits = np.linspace(-2, 2, vocab_size, dtype=np.float32)[
        [3, 0, 7, 11, 5, 1, 9, 2, 10, 4, 8, 6]
    ]
    x = tempered(logits, parameters.get("temperature", 1.0))
    keep = kept(
        x,
        parameters.get("min_p", 0.0),
        int(parameters.get("top_k", 0)),
        parameters.get("top_p", 1.0),
    )
    weights = np.where(keep, np.exp(x.astype(np.float64)), 0)
    rows = make_rows(
        draws,
        seed=np.arange(draws) // 2 * 7919,
        position=np.arange(draws) % 2 + 1000,
        **parameters,
    )
    every = np.repeat(logits[None], draws, 0)
    got = native_sample(run_op, isa, every, rows, np.zeros(draws, np.int32), 2)
    observed = np.bincount(got.ids, minlength=vocab_size)
    assert observed[~keep].sum() == 0
    freedom = int(keep.sum()) - 1
    statistic = chi_square(observed[keep], (weights / weights.sum() * draws)[keep])
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4  # about one in 10^5 by chance


def test_the_draw_is_the_cores_gumbel_noise(run_op: RunOp, isa: Isa) -> None:
    """The id that is drawn on equal logits is where the noise is greatest, on every instruction
    set."""
    vocab_size, count = 151_936, 4
    seeds = np.array([0, 1, (1 << 64) - 1, 0x0123456789ABCDEF], np.uint64)
    rows = make_rows(count, seed=seeds, position=[0, 7, (1 << 31) - 1, 1])
    logits = np.zeros((count, vocab_size), np.float32)
    got = native_sample(run_op, isa, logits, rows, np.zeros(count, np.int32))
    want = gumbel_noise(NUMPY, logits, seeds, rows.position).argmax(-1)
    assert got.ids.tolist() == want.tolist()
