"""Input features sorted by their groups, and groups filled up to whole units."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.weights.coded import FILLED_UNIT, CodedRows, features_of, filled_order

SIZES = [(1, 31, 32, 0, 33, 64, 100), (5,), (0, 0, 40), (64, 32), (1,) * 40]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_filled_order(sizes: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(sizes))
    group_of = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    order = filled_order(group_of)
    features, group = features_of(order), []
    for index, size in enumerate(sizes):
        group += [index] * (-(-size // FILLED_UNIT) * FILLED_UNIT)
    np.testing.assert_array_equal(group_of[features], group)
    held = order >= 0
    np.testing.assert_array_equal(np.sort(order[held]), np.arange(sum(sizes)))
    for index in set(group):  # in their own order, and what fills up behind them
        of_group = order[np.array(group) == index]
        np.testing.assert_array_equal(of_group[: sizes[index]], np.flatnonzero(group_of == index))
        assert (of_group[sizes[index] :] < 0).all()
    assert order.dtype == np.int32


@pytest.mark.parametrize("shuffled", [False, True])
def test_factors(shuffled: bool) -> None:
    group_of = np.array([0, 0, 0, 1, 1, 1], np.int32)
    if shuffled:
        group_of = group_of[::-1]
    scales = np.array([[2.0, 3.0]], np.float32)
    codes, zeros = np.zeros((1, 6), np.uint8), np.array([[7, 9]])
    rows = CodedRows(codes, scales, zeros, group_of if shuffled else None)
    found, lows = rows.factors(np.array([5, 0, 3], np.int32))
    assert lows is not None
    np.testing.assert_array_equal(found[0], scales[0, group_of[[5, 0, 3]]])
    np.testing.assert_array_equal(lows[0], zeros[0, group_of[[5, 0, 3]]])
    assert CodedRows(codes, scales, None, None).factors(np.array([0], np.int32))[1] is None
