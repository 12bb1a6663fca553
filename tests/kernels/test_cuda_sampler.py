"""The device sampler on the emulator, against vllmx_core.reference.sampler: the same ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.plan import LogitEdits, SamplingRows, StepResult, TokenCounts
from vllmx_core.reference.sampler import sample
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.sampling import BINS, CANDIDATES, CHUNK, FEW, num_chunks
from vllmx_cuda.program.sampler import Draw, draw_of
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import Array, inout, on_device


def sampling_rows(count: int, **given: Any) -> SamplingRows:
    """Greedy rows without any wish, unless given."""
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 0,
        "position": 0,
        "target": -1,
        "num_logprobs": -1,
    }
    types = {
        "top_k": np.int32,
        "position": np.int32,
        "target": np.int32,
        "num_logprobs": np.int32,
        "seed": np.uint64,
    }
    arrays = {
        name: np.broadcast_to(given.pop(name, value), count).astype(types.get(name, np.float32))
        for name, value in values.items()
    }
    width = int(arrays["num_logprobs"].max())
    greedy = bool((arrays["temperature"] == 0).all())
    return SamplingRows(**arrays, max_logprobs=width, all_greedy=greedy, **given)


def run_sampler(
    emulator: Emulator, logits: Array, rows: SamplingRows, fed: Array, draw: Draw
) -> tuple[Array, dict[str, Array]]:
    """(ids, logprob arrays), by the launches that a backend makes."""
    count, vocab = logits.shape
    chunks, width = num_chunks(vocab), max(rows.max_logprobs, 0)
    size = {"rows": count, "vocab": vocab}
    raw = on_device(logits, np.float32)
    device = {
        name: on_device(getattr(rows, name), getattr(rows, name).dtype)
        for name in ("temperature", "top_k", "top_p", "seed", "position", "target", "num_logprobs",
                     "repetition_penalty", "frequency_penalty", "presence_penalty")
    }  # fmt: skip
    with np.errstate(divide="ignore"):
        min_x = on_device(np.log(rows.min_p.astype(np.float64)), np.float32)

    def launch(entry: str, sizes: dict[str, int], arguments: list[Any]) -> None:
        emulator.launch(KERNELS[entry].variant(), sizes, arguments)

    edited = raw
    if rows.edits or rows.counts or rows.masks is not None:
        edited = empty(logits.shape, np.float32)
        masks = None if rows.masks is None else on_device(rows.masks, np.uint32)
        index = None if rows.mask_index is None else on_device(rows.mask_index, np.int32)
        words = 0 if masks is None else masks.shape[1]
        launch("mask_logits", size, [raw, index, masks, device["target"], edited, vocab, words])
        sparse: list[Array | None] = [None] * 7
        if rows.edits is not None:
            sparse[:3] = [rows.edits.start, rows.edits.ids, rows.edits.values]
        if rows.counts is not None:
            c = rows.counts
            sparse[3:] = [c.start, c.ids, c.output_counts, c.pending.astype(np.uint8)]
        sparse = [None if a is None else on_device(a, a.dtype) for a in sparse]
        launch("edit_logits", {"rows": count}, [
            edited, *sparse, on_device(fed, np.int32), on_device(np.arange(count), np.int32),
            device["repetition_penalty"], device["frequency_penalty"], device["presence_penalty"],
            device["target"], vocab,
        ])  # fmt: skip
    best, least, score, argmax, drawn, listed = (
        empty((count, chunks), kind) for kind in [np.float32] * 3 + [np.int32] * 3
    )
    lists, list_ids = (empty((count, chunks, CANDIDATES), t) for t in (np.float32, np.int32))
    ids = empty(count, np.int32)
    tempered, target = device["temperature"], device["target"]
    filters = min_x, device["top_k"], device["top_p"]
    noise = device["seed"], device["position"]
    if draw == "few":
        found = best, argmax, least, listed, lists, list_ids
        launch(
            "sample_candidates", size, [edited, tempered, device["top_k"], target, *found, vocab]
        )
        each = [tempered, *filters, *noise, target, ids]
        launch("sample_among", {"rows": count}, [edited, *found, *each, vocab, chunks])
    else:
        launch("sample_max", size, [edited, best, argmax, vocab])
        if draw == "any":
            bins = inout(np.zeros((count, BINS)), np.uint32)
            masses = inout(np.zeros((count, BINS)), np.uint64)
            threshold = empty(count, np.float32)
            common = [edited, best, argmax, tempered]
            with_bins = [*common, *filters, target, bins, masses]
            launch("sample_count", size, [*with_bins, vocab])
            launch("sample_collect", size, [*with_bins, listed, lists, vocab])
            launch("sample_threshold", {"rows": count}, [
                *with_bins, listed, lists, threshold, vocab, chunks,
            ])  # fmt: skip
            assert not bins.any()
            assert not masses.any()
            launch("sample_draw", size, [*common, threshold, *noise, target, score, drawn, vocab])
        launch("sample_pick", {"rows": count}, [
            best, argmax, score, drawn, tempered, target, ids, chunks,
        ])  # fmt: skip
    if rows.max_logprobs < 0:
        return ids, {}
    parts: list[Array | None] = [empty((count, chunks), np.float32) for _ in range(2)]
    tops = [empty((count, chunks, width), kind) for kind in (np.float32, np.int32)]
    parts += tops if width else [None, None]
    launch("logprob_chunks", size, [raw, device["num_logprobs"], *parts, vocab, width])
    out = {
        "chosen": empty(count, np.float32),
        "rank": empty(count, np.int32),
        "top_ids": empty((count, width), np.int32),
        "top": empty((count, width), np.float32),
    }
    launch("logprob_rows", {"rows": count}, [
        raw, device["num_logprobs"], ids, *parts,
        *(array if array.size else None for array in out.values()), vocab, chunks, width,
    ])  # fmt: skip
    return ids, out


def check(
    emulator: Emulator, logits: Array, rows: SamplingRows, fed: Array | None = None
) -> StepResult:
    fed = np.zeros(len(logits), np.int32) if fed is None else fed
    want = sample(logits.astype(np.float32), rows, fed)
    draw = draw_of(rows)
    ids, logprobs = run_sampler(emulator, logits, rows, fed, draw)
    np.testing.assert_array_equal(ids, want.ids)
    if draw == "few":  # a batch mate may want more
        ids, _ = run_sampler(emulator, logits, replace(rows, max_logprobs=-1), fed, "any")
        np.testing.assert_array_equal(ids, want.ids)
    for name, got in logprobs.items():
        assert want.logprobs is not None
        if got.dtype == np.float32:
            np.testing.assert_allclose(got, getattr(want.logprobs, name), rtol=1e-6, atol=3e-6)
        else:
            np.testing.assert_array_equal(got, getattr(want.logprobs, name))
    return want


VOCABS = [1, 5, 1000, CHUNK, CHUNK + 1, 2 * CHUNK + 777]


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_lowest_of_equal_ids(emulator: Emulator, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((3, vocab)).round(1)
    logits[1] = -np.inf
    logits[1, [vocab - 1, vocab // 2]] = -3.0
    check(emulator, logits, sampling_rows(3))


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_the_references(emulator: Emulator, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 12
    logits = rng.standard_normal((count, vocab)) * 3
    rows = sampling_rows(
        count,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], count),
        top_k=rng.choice([0, 1, 3, 50, vocab, 1 << 30], count),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01], count),
        min_p=rng.choice([0.0, 0.02, 1.0], count),
        seed=rng.integers(0, 1 << 63, count),
        position=rng.integers(0, 1 << 20, count),
    )
    check(emulator, logits, rows)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_from_few_ids_are_the_references(emulator: Emulator, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 5
    rows = sampling_rows(
        count,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], count),
        top_k=[1, 20, FEW, 9, 2],
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01], count),
        min_p=rng.choice([0.0, 0.02, 1.0], count),
        seed=rng.integers(0, 1 << 63, count),
        position=rng.integers(0, 1 << 20, count),
        target=[-1, -1, -1, -1, 0],
    )
    assert draw_of(rows) == "few"
    check(emulator, rng.standard_normal((count, vocab)) * 3, rows)
    check(
        emulator, rng.standard_normal((1, vocab)), sampling_rows(1, temperature=1, top_k=20, seed=3)
    )


def test_flat_rows_take_no_more_than_their_filters_leave(emulator: Emulator) -> None:
    """Whatever is kept by mistake is drawn: most of the mass lies below the thresholds."""
    logits = np.random.default_rng(4).standard_normal((4, CHUNK + 777))
    top_k, top_p = [FEW + 6, 0, 300, 20], [1, 0.02, 0.5, 0.3]
    check(emulator, logits, sampling_rows(4, top_k=top_k, top_p=top_p, temperature=3, seed=7))
    check(emulator, logits[:2], sampling_rows(2, top_k=[20, 9], temperature=3, seed=[5, 6]))


def test_few_ids_as_likely_as_the_last_all_stay(emulator: Emulator) -> None:
    """Their logits differ by more than a list allows for, and their x do not."""
    logits = np.full((4, 512), -5e4, np.float32)
    logits[:, 1:101] = 1 + np.arange(100) * np.float32(1e-6)
    logits[:, 0] = 3000.0
    check(emulator, logits, sampling_rows(4, top_k=2, temperature=1e4, seed=range(4)))


def test_what_no_list_holds_is_found_in_the_whole_row(emulator: Emulator) -> None:
    """More ties than a list has places; ids whose logits differ, and whose x do not."""
    count, vocab = 3, CHUNK + 300
    rng = np.random.default_rng(3)
    flat = rng.integers(0, 3, (count, vocab)) * 0.001
    common = {"seed": np.arange(count), "temperature": [1.0, 0.2, 3.0]}
    check(emulator, flat, sampling_rows(count, top_k=5, top_p=[1, 0.7, 1], **common))
    check(emulator, flat, sampling_rows(count, top_k=[0, 700, 0], top_p=0.4, **common))
    close = (1 + np.arange(count * vocab) % vocab * 2.0**-23).reshape(count, -1).astype(np.float32)
    close[:, 77] = 3000.0  # far above: the others' x are equal by the hundred
    rows = sampling_rows(count, top_k=[2, 5, 64], **{**common, "temperature": 1e4})
    check(emulator, close, rows)


def test_ties_at_the_edge_of_top_k_and_top_p_stay_together(emulator: Emulator) -> None:
    rng = np.random.default_rng(5)
    logits = rng.integers(-4, 3, (9, 300)).astype(np.float32)
    top_k, top_p = [7] * 3 + [0] * 3 + [150] * 3, [1] * 3 + [0.37] * 3 + [0.6] * 3
    common = {"seed": np.arange(9), "temperature": 0.9}
    check(emulator, logits, sampling_rows(9, top_k=top_k, top_p=top_p, min_p=0.01, **common))
    check(emulator, logits[:3], sampling_rows(3, top_k=7, seed=np.arange(3), temperature=0.9))


def test_masks_edits_and_penalties(emulator: Emulator) -> None:
    rng = np.random.default_rng(6)
    count, vocab = 6, 100
    logits = rng.standard_normal((count, vocab)) * 2
    per_row = [rng.choice(vocab, 5, replace=False) for _ in range(count)]
    ids = np.concatenate(per_row).astype(np.int32)
    start = np.arange(0, 5 * count + 1, 5, dtype=np.int32)
    edits = LogitEdits(start, ids, rng.choice([-np.inf, 2.5, -1.0], 5 * count).astype(np.float32))
    fed = np.array([r[0] for r in per_row], np.int32)
    fed[1] = next(i for i in range(vocab) if i not in per_row[1])
    counted = ids.reshape(count, 5)[:, ::-1].ravel().copy()  # by other threads than the edits
    counts = TokenCounts(
        start, counted, rng.integers(0, 3, 5 * count).astype(np.int32), np.arange(count) < 3
    )
    masks = rng.integers(0, 1 << 32, (2, 4), dtype=np.uint64).astype(np.uint32)
    rows = sampling_rows(
        count,
        temperature=[0, 0.7, 0, 1.3, 0, 1],
        seed=np.arange(count),
        edits=edits,
        counts=counts,
        masks=masks,
        mask_index=np.array([0, 1, -1, -1, 1, 0], np.int32),
        repetition_penalty=[1.3, 0.7, 1, 1.1, 2, 1],
        frequency_penalty=[0.5, 0, -1, 0.2, 0, 0],
        presence_penalty=[0, 0.3, 0.4, -0.2, 0, 1],
        num_logprobs=2,
    )
    check(emulator, logits, rows, fed)
    check(emulator, logits, replace(rows, masks=None, mask_index=None, edits=None), fed)


@pytest.mark.parametrize("vocab", [3, 2 * CHUNK + 777])
def test_logprobs(emulator: Emulator, vocab: int) -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((5, vocab)) * 3).round(1)
    logits[2, 1:] = -np.inf
    target = np.array([-1, 2, -1, -1, 0])
    rows = sampling_rows(5, num_logprobs=[5, 3, 2, -1, 0], target=target)
    check(emulator, logits, rows)


def test_logprobs_of_whole_rows(emulator: Emulator) -> None:
    """All ids in order, ties among them, and more than there are."""
    logits = (np.random.default_rng(8).standard_normal((3, 61)) * 3).round(1)
    logits[1, 7:] = -np.inf
    check(emulator, logits, sampling_rows(3, num_logprobs=[61, 61, 64]))


@pytest.mark.parametrize(("count", "vocab"), [(1, 1), (1, CHUNK), (4, 33)])
def test_logprobs_of_the_chosen_alone(emulator: Emulator, count: int, vocab: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((count, vocab)) * 3
    check(emulator, logits, sampling_rows(count, num_logprobs=0, temperature=0.9))


@pytest.mark.parametrize("vocab", [1, 33])
def test_rows_without_a_wish_beside_one_that_has_some(emulator: Emulator, vocab: int) -> None:
    """Edits and counts of the second row alone; the last word of a mask in part."""
    logits = np.random.default_rng(vocab).standard_normal((3, vocab))
    ids = np.arange(vocab, dtype=np.int32)
    start = np.array([0, 0, vocab, vocab], np.int32)
    edits = LogitEdits(start, ids, np.linspace(-2, 2, vocab, dtype=np.float32))
    counts = TokenCounts(start, ids, np.ones(vocab, np.int32), np.array([False, True, False]))
    masks = np.array([[1, 0]], np.uint32)[:, : -(-vocab // 32)]
    rows = sampling_rows(
        3,
        edits=edits,
        counts=counts,
        masks=masks,
        mask_index=np.array([-1, -1, 0], np.int32),
        repetition_penalty=1.5,
        temperature=[0, 0.7, 1.3],
    )
    want = check(emulator, logits, rows)
    assert want.ids[2] == 0
    alone = LogitEdits(np.array([0, vocab], np.int32), ids, edits.values)
    check(emulator, logits[:1], sampling_rows(1, edits=alone))


def test_rows_that_cannot_be_sampled_are_refused(emulator: Emulator) -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((6, 200))
    logits[0, 3] = np.nan
    logits[1, 150] = np.inf
    logits[2] = -np.inf
    logits[3, 7] = np.nan
    masks = np.full((1, 7), 0xFFFFFFFF, np.uint32)
    masks[0, 0] = 0  # hides the NaN of row 3
    index = np.array([-1, -1, -1, 0, -1, -1], np.int32)
    target = np.array([4, -1, -1, -1, 5, -1])
    rows = sampling_rows(
        6,
        temperature=[0, 1, 1, 1, 0, 1],
        target=target,
        num_logprobs=1,
        masks=masks,
        mask_index=index,
    )
    want = check(emulator, logits, rows)
    assert (want.ids[:4] == -1).all()
    assert (want.ids[4:] >= 0).all()
