"""The ops of towers: what they compute where no served model shows it, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.errors import OpError
from vllmx_core.image_plan import tower_plan, turns_of
from vllmx_core.model import ImagePlaces
from vllmx_core.ops.downsample import Downsample
from vllmx_core.ops.formulas import NumpyFrame, NumpyWeights
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.place import Place
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.unfold import Unfold
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_testing.plans import Row, make_plan

STEP = StepInputs()


def frame(tokens: int, rows: list[int] | None = None) -> NumpyFrame:
    plan = make_plan([Row(list(range(tokens)), 0, [0])], 16)
    plan = replace(plan, feature_rows=None if rows is None else np.array(rows, np.int32))
    features = (np.arange(12, dtype=np.float32).reshape(4, 3),)
    return NumpyFrame(NumpyWeights({}, {}), plan, (), None, (), features)


def test_merge() -> None:
    x, found = Value(3), frame(4)
    found[x] = np.arange(12, dtype=np.float32).reshape(4, 3)
    for kind, wanted in (("join", found[x].reshape(2, 6)), ("mean", found[x][::2] + 1.5)):
        op = Merge.of(x, 2, kind)  # type: ignore[arg-type]
        op.compute(found)
        assert op.out.rows == "L"
        np.testing.assert_array_equal(found[op.out], wanted)


@pytest.mark.parametrize(("first", "split"), [(-1, 0), (0, 0), (-1, 3), (1, 3)])
def test_unfold(first: int, split: int) -> None:
    """The windows of a convolution over two sequences of two frames a row, in one value or two."""
    rng = np.random.default_rng(first + 5)
    frames = rng.standard_normal((7, 2, 3)).astype(np.float32)  # rows, frames, channels
    plan = make_plan([Row([1] * 3, 0, [0]), Row([1] * 4, 0, [1])], 16)
    found = NumpyFrame(NumpyWeights({}, {}), plan, (), None)
    x, y = Value(split or 6), Value(3) if split else None
    found[x] = frames.reshape(7, -1)[:, : x.width]
    if y is not None:
        found[y] = frames[:, 1]
    op = Unfold.of(x, 3, first, STEP, y)
    op.check()
    op.compute(found)
    for begin, end in ((0, 3), (3, 7)):
        own = np.pad(frames[begin:end].reshape(-1, 3), ((3, 3), (0, 0)))
        for row in range(end - begin):
            at = 2 * row + first + 3
            np.testing.assert_array_equal(found[op.out][begin + row], own[at : at + 3].T.ravel())


@pytest.mark.parametrize("adds", [False, True])
def test_place(adds: bool) -> None:
    x = Value(3)
    op = Place.of(x, STEP, 0, adds)
    for rows in (None, [-1, -1, -1], [3, -1, 0]):
        found = frame(3, rows)
        found[x] = np.ones((3, 3), np.float32)
        op.compute(found)
        wanted = np.ones((3, 3), np.float32)
        for token, row in enumerate(rows or ()):
            if row >= 0:
                wanted[token] = found.features[0][row] + (1 if adds else 0)
        np.testing.assert_array_equal(found[op.out], wanted)


def test_what_does_not_fit_is_refused() -> None:
    ops = Ops("seeing")
    x = ops.patches(STEP, 4)
    merged = ops.merge(x, 2)
    with pytest.raises(OpError, match="pooled"):
        ops.place(merged, STEP)
    with pytest.raises(OpError, match="no part -1"):
        ops.place(x, STEP, -1)
    with pytest.raises(OpError, match="cannot be merged"):
        ops.merge(x, 0)
    for features in (merged, (merged,), (merged, x), (merged, ops.merge(x, 1))):
        with pytest.raises(OpError, match="the tower returned"):
            ops.finished_tower(features, 2, 8)
    tower = ops.finished_tower((merged, merged), 2, 8)
    assert [op.name for op in tower.ops][-2:] == ["keep", "keep"]


def test_turns() -> None:
    def places(count: int, advance: int) -> ImagePlaces:
        nothing = np.zeros((0, 0))
        line = np.arange(count, dtype=np.int32)
        positions = np.stack([0 * line, line])
        return ImagePlaces(positions, nothing, nothing, positions, advance)  # type: ignore[arg-type]

    turns = turns_of([(2, places(3, 1)), (6, places(2, 2))])
    assert turns is not None
    assert turns.at(0, 10).tolist() == [
        [0, 1, 2, 2, 2, 3, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 7],
    ]
    assert turns.at(3, 5).tolist() == [[2, 2], [3, 4]]
    assert turns.at(9, 11).tolist() == [[7, 8], [7, 8]]
    assert turns_of([]) is None


class Tower:
    """An `Encoder` of two patches for a token, whose places nobody asks for."""

    patches_per_token = 2


def test_a_pass_keeps_the_features_of_tokens_alone() -> None:
    """Rows behind the patches have patches of zeros and go to the spare row; tokens of text have
    no feature, and an order is that of patches and features alike."""

    def places(rows: int, **others: Any) -> ImagePlaces:
        positions, ones = np.zeros((2, rows), np.int32), np.ones((rows, 1), np.float32)
        return ImagePlaces(positions, np.zeros((rows, 1), np.int32), ones, None, rows, **others)

    order, featured = np.array([1, 0], np.int32), np.array([0, 3], np.int32)
    added, broken = places(6), places(4, order=order, featured=featured)
    assert (added.num_tokens(2), broken.num_tokens(2)) == (2, 4)
    patches = [np.full((4, 3), 1, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)]
    keep = np.array([5, 6, 10, 11, 12, 13], np.int32)
    plan = tower_plan(Tower(), patches, [added, broken], keep, 99)  # type: ignore[arg-type]
    assert plan.query_start.tolist() == [0, 6, 10]
    assert plan.patches is not None
    assert plan.patches.keep.tolist() == [5, 6, 99, 13, 10]
    assert plan.patches.values[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 6, 9, 0, 3]


def test_downsample() -> None:
    """A chunk has 20 frames in three rows, with four frames in the last row. One audio has two
    chunks and ends within the second; the other is shorter than a chunk."""
    rng = np.random.default_rng(7)
    bins, channels, frames, counts = 5, (3, 4, 2), 20, (5, 1)
    x, rows = Value(8 * bins), sum(counts)
    arrays, biases, refs, before = {}, {}, [], 1
    for name, size in zip("abc", channels, strict=True):
        arrays[name] = rng.standard_normal((size, 9 * before)).astype(np.float32)
        biases[name] = rng.standard_normal(size).astype(np.float32)
        refs.append(WeightRef(name, "linear", size, 9 * before))
        before = size
    plan = make_plan([Row([1] * count, 0, [place]) for place, count in enumerate(counts)], 16)
    found = NumpyFrame(NumpyWeights(arrays, biases), plan, (), None)
    found[x] = rng.standard_normal((rows, x.width)).astype(np.float32)
    op = Downsample.of(x, (refs[0], refs[1], refs[2]), frames, STEP)
    op.check()
    op.compute(found)
    assert op.rows == 3
    for first, count in ((0, 3), (3, 2), (5, 1)):
        y = found[x][first : first + count].reshape(-1, bins)[:frames]
        y = np.pad(y, ((0, frames - len(y)), (0, 0)))[None]  # (C, times, bins)
        for name in "abc":
            y = convolved(y, arrays[name], biases[name])
        wanted = y.transpose(1, 2, 0)[:count].reshape(count, -1)
        np.testing.assert_allclose(found[op.out][first : first + count], wanted, 1e-4, 1e-4)


def convolved(y: Any, w: Any, bias: Any) -> Any:
    """(C, times, bins): each value by itself."""
    padded = np.pad(y.astype(np.float64), ((0, 0), (1, 1), (1, 1)))
    times, bins = -(-y.shape[1] // 2), -(-y.shape[2] // 2)
    found = np.zeros((len(w), times, bins))
    for time, place in np.ndindex(times, bins):
        seen = padded[:, 2 * time : 2 * time + 3, 2 * place : 2 * place + 3].transpose(1, 2, 0)
        found[:, time, place] = w @ seen.ravel() + bias
    return NUMPY.gelu(found)


def test_downsample_refuses_what_does_not_fit() -> None:
    refs = tuple(
        WeightRef(name, "linear", 4, 9 * cols) for name, cols in zip("abc", (1, 4, 4), strict=True)
    )
    with pytest.raises(OpError, match="no 8 frames"):
        Downsample.of(Value(13), refs, 20, STEP).check()  # type: ignore[arg-type]
    with pytest.raises(OpError, match="has 9 columns, not 36"):
        Downsample.of(Value(16), (refs[0], refs[0], refs[0]), 20, STEP).check()
