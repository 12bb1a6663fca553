"""Thoughts that have become too long end by forced tokens."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_engine.core.thought_budget import ThoughtBudget
from vllmx_engine.grammar.matcher import allowed_ids
from vllmx_engine.wire.grammars import Thoughts

BEGIN, END = (3, 40), (4, 41)


def run(budget: int, wanted: list[int], begin: tuple[int, ...] = ()) -> list[int]:
    """The answer of a model that would say `wanted`, each token where nothing else is forced."""
    row, answer, left = ThoughtBudget(Thoughts(budget, begin, END), None), [], list(wanted)
    while left:
        mask = np.zeros(2, np.uint32)
        row.fill_mask(mask)
        allowed = list(allowed_ids(mask))
        assert row.is_free is (len(allowed) == 64)
        if row.is_free:
            assert row.forced_tokens() == []
            answer.append(left.pop(0))
        else:
            assert row.forced_tokens()[:1] == allowed
            answer.append(allowed[0])
        assert row.accept(answer[-1]) is False
    return answer


@pytest.mark.parametrize(
    ("budget", "wanted", "begin", "answer"),
    [
        (0, [7, 8], (), [4, 41, 7, 8]),
        (2, [7, 8, 9, 10], (), [7, 8, 4, 41, 9, 10]),
        (9, [7, 4, 41, 8, 9, 8, 9, 8, 9, 8, 9, 8], (), [7, 4, 41, 8, 9, 8, 9, 8, 9, 8, 9, 8]),
        (3, [7, 4, 4, 41, 8], (), [7, 4, 4, 4, 41, 41, 8]),
        (1, [3, 40, 7, 8], BEGIN, [3, 40, 7, 4, 41, 8]),
        (0, [3, 40, 7], BEGIN, [3, 40, 4, 41, 7]),
        (0, [3, 7, 8], BEGIN, [3, 7, 8]),
        (0, [7, 3, 40, 8], BEGIN, [7, 3, 40, 8]),
    ],
)
def test_budgets(budget: int, wanted: list[int], begin: tuple[int, ...], answer: list[int]) -> None:
    assert run(budget, wanted, begin) == answer
