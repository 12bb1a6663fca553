"""Rows of a step as tiles, and tiles as batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.plan import StepPlan
from vllmx_core.query_tiles import QueryTiles
from vllmx_testing.plans import Row, make_plan

PAGE = 16


def plan_of(rows: list[tuple[int, int]]) -> StepPlan:
    """A plan with rows of (positions before, tokens)."""
    return make_plan(
        [Row([1] * count, start, range((start + count) // PAGE + 1)) for start, count in rows], PAGE
    )


ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=12)


@given(
    ROWS,
    st.integers(1, 12),
    st.integers(-50, 50),
    st.booleans(),
    st.integers(1, 600),
    st.sampled_from([1.0, 1.25, np.inf]),
    st.sampled_from([0, 16]),
)
def test_every_token_is_in_one_tile_of_one_group(
    rows: list[tuple[int, int]],
    most_queries: int,
    reach: int,
    causal: bool,
    most_keys: int,
    padding: float,
    slack: int,
) -> None:
    plan = plan_of(rows)
    tiles = QueryTiles.cut(plan, reach, causal, most_queries)
    assert tiles.tokens().tolist() == list(range(plan.num_tokens))
    groups = tiles.groups(most_keys, padding=padding, slack=slack)
    tokens = np.concatenate([group.tokens() for group in groups])
    assert sorted(tokens.tolist()) == list(range(plan.num_tokens))
    for group in groups:
        assert len(set(group.queries)) == 1
        assert group.queries[0] <= most_queries
        gathered, held = len(group) * group.longest, (group.last_key - group.first_key + 1).sum()
        assert len(group) == 1 or gathered <= min(most_keys, padding * held + slack * len(group))


@given(ROWS, st.integers(1, 12), st.integers(-50, 50))
def test_a_tile_spans_the_keys_that_its_queries_see(
    rows: list[tuple[int, int]], most_queries: int, reach: int
) -> None:
    plan = plan_of(rows)
    tiles = QueryTiles.cut(plan, reach, True, most_queries)
    for index in range(len(tiles)):
        positions = plan.positions[tiles.take(np.array([index])).tokens()]
        assert tiles.last_key[index] == positions.max()
        first = max(0, positions.min() - reach + 1) if reach > 0 else 0
        if reach < 0:
            first = positions.min() // -reach * -reach
        assert tiles.first_key[index] == first


@pytest.mark.parametrize(("padding", "groups"), [(np.inf, 1), (1.25, 2)])
def test_rows_of_very_different_lengths_are_not_padded_to_the_longest(
    padding: float, groups: int
) -> None:
    plan = plan_of([(4000, 1), (17, 1), (4010, 1), (20, 1)])
    tiles = QueryTiles.cut(plan, 0, True, 256)
    assert len(tiles.groups(1 << 16, padding=padding)) == groups
