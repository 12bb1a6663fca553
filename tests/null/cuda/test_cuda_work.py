"""Attention's work items: every visible position exactly once, within the capacity."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.plan import StepPlan
from vllmx_cuda.program.work import (
    MIN_SPLIT,
    TileKind,
    Visibility,
    item_capacity,
    plan_items,
    plan_tiles,
)
from vllmx_testing.plans import Row, make_plan

PAGE = 16


def random_plan(random: np.random.Generator, decode: bool) -> StepPlan:
    rows = []
    for _ in range(int(random.integers(1, 9))):
        start = int(random.integers(0, 3000))
        length = 1 if decode else int(random.integers(1, 40))
        rows.append(Row([1] * length, start, list(range(-(-(start + length) // PAGE)))))
    return make_plan(rows, PAGE)


def visible(plan: StepPlan, token: int, seen: Visibility) -> set[int]:
    """Which keys are seen, by the definition of `AttentionSpec`."""
    row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
    position = int(plan.positions[token])
    window = seen.reach if seen.reach > 0 else 1 << 30
    start = position // -seen.reach * -seen.reach if seen.reach < 0 else 0
    return {
        key
        for key in range(int(plan.context_len[row]))
        if (key <= position or not seen.causal) and abs(position - key) < window and key >= start
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "seen",
    [
        Visibility(),
        Visibility(200),
        Visibility(-30),
        Visibility(causal=False),
        Visibility(7, causal=False),
    ],
    ids=str,
)
def test_every_token_sees_what_it_may_once(seed: int, seen: Visibility) -> None:
    random = np.random.default_rng(seed)
    plan = random_plan(random, decode=seed % 2 == 0)
    padded = plan.num_tokens + int(random.integers(0, 5))
    capacity = padded + int(random.integers(0, 60))
    work = plan_items(plan, seen, padded, capacity)
    assert work.items.shape == (capacity, 4)
    assert work.items.dtype == work.first_item.dtype == np.int32
    used = int(work.first_item[plan.num_tokens])
    assert (work.items[used:, 0] == -1).all()
    assert (work.first_item[plan.num_tokens :] == used).all(), "padding has no items"
    for token in range(plan.num_tokens):
        mine = work.items[work.first_item[token] : work.first_item[token + 1]]
        row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
        assert (mine[:, 0] == token).all()
        assert (mine[:, 1] == row).all()
        assert (mine[:, 2] < mine[:, 3]).all(), "no empty item"
        assert (mine[1:, 2] % MIN_SPLIT == 0).all(), "cut where a page begins"
        positions = [key for _, _, begin, end in mine for key in range(begin, end)]
        assert len(positions) == len(set(positions))
        assert set(positions) == visible(plan, token, seen)


def test_a_long_context_is_split_as_far_as_the_capacity_goes() -> None:
    plan = make_plan([Row([1], 32767, range(2048)), Row([1], 9, [0])], PAGE)
    capacity = item_capacity(2, num_processors=132, blocks_an_item=8)
    assert capacity == 2 + 66
    work = plan_items(plan, Visibility(), 2, capacity)
    first, second = np.diff(work.first_item)
    assert 60 <= first <= 67
    assert second == 1


def test_one_length_for_all_when_nothing_is_spare() -> None:
    plan = make_plan([Row([1], 5000, range(400)), Row([1], 2, [0])], PAGE)
    assert np.diff(plan_items(plan, Visibility(), 2, 2).first_item).tolist() == [1, 1]


def test_a_plan_of_nothing_but_padding() -> None:
    empty = np.zeros(0, np.int32)
    plan = StepPlan(
        empty, empty, (empty,), np.zeros(1, np.int32), empty, (empty.reshape(0, 0),), empty
    )
    work = plan_items(plan, Visibility(), 4, 9)
    assert (work.items == -1).all()
    assert work.first_item.tolist() == [0] * 5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tile_tokens", [4, 16, 64])
def test_tiles_and_items_share_the_tokens(seed: int, tile_tokens: int) -> None:
    """Rows of several tokens go to tiles, each token once; single ones have the only items."""
    random = np.random.default_rng(seed)
    rows = [Row([1] * length, 5, [0] * 20, "none") for length in random.choice([1, 2, 37, 64], 7)]
    plan = make_plan(rows, PAGE)
    tiles, seen = plan_tiles(plan, TileKind(tile_tokens)), []
    assert tiles.shape[1] == 4
    assert (np.diff(tiles[:, 3]) <= 0).all(), "long contexts first"
    for row, first, count, position in tiles.tolist():
        assert 0 < count <= tile_tokens
        assert plan.query_start[row] <= first
        assert first + count <= plan.query_start[row + 1]
        assert plan.positions[first] == position
        seen += range(first, first + count)
    work = plan_items(plan, Visibility(), plan.num_tokens, plan.num_tokens, single_rows_only=True)
    items = work.items[work.items[:, 0] >= 0]
    assert sorted([*seen, *items[:, 0].tolist()]) == list(range(plan.num_tokens))
    singles = np.flatnonzero(np.diff(plan.query_start) == 1)
    assert set(items[:, 1].tolist()) == set(singles.tolist())


@pytest.mark.parametrize("window", [None, 5])
def test_segments_look_at_their_own_tokens(window: int | None) -> None:
    """Positions do not matter; the row of an item or a tile is the segment's first token."""
    plan = make_plan([Row([1] * n, 5, [0] * 20, "none") for n in (3, 1, 20, 2)], PAGE)
    seen, count = Visibility(window or 0, causal=False, segments="rows"), plan.num_tokens
    items = plan_items(plan, seen, count, 2 * count).items
    assert sorted(items[items[:, 0] >= 0, 0].tolist()) == list(range(count))
    for token, first, begin, end in items[items[:, 0] >= 0].tolist():
        row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
        length, place = int(np.diff(plan.query_start)[row]), token - first
        assert first == plan.query_start[row]
        reach = length if window is None else window
        assert (begin, end) == (max(0, place - reach + 1), min(length, place + reach))
    for first, token, size, place in plan_tiles(plan, TileKind(8, segments="rows")).tolist():
        assert first in plan.query_start
        assert token - first == place
        assert size <= 8
