"""Plants faults in speculation: a mixture of requests finds each of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllmx_engine.core import batch, commit, grammar_rows, row_states, rows, sampling_rows
from vllmx_engine.grammar import matcher

from .grammar_driver import Driver, regex
from .test_speculation import run_mixed, run_plain


@pytest.fixture(autouse=True)
def quick_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with grammars draft however slow the machine is."""
    monkeypatch.setattr(matcher, "QUICK_S", 1e9)
    monkeypatch.setattr(grammar_rows, "SLOW_S", 1e9)


def run_masked() -> None:
    """Runs requests with grammars, whose drafts are wrong now and then, beside those without."""
    grammars = {f"r{seed}": regex(f"(ab|cd|e[f-m]|[0-4]x){{{seed}}}") for seed in range(6, 12)}
    found = []
    for _ in range(2):
        driver = Driver(drafts=dict(found[0]) if found else None)
        for seed, (name, grammar) in enumerate(grammars.items()):
            driver.add(name, grammar, seed=seed)
        driver.run()
        found.append(driver.ids)
    assert found[0] == found[1]
    assert {last.finish_reason for last in driver.last.values()} == {"stop"}
    assert driver.core.stats().num_accepted_tokens > 40


def test_answers_that_follow_grammars_do_not_depend_on_drafts() -> None:
    run_masked()


FAULTS = [
    (commit, "_drawn", "(drawn[:, :-1] != drafts.ids)", "False"),
    (commit.Committer, "_resume", "lengths - 1 + num_new", "lengths - 2 + num_new"),
    (commit.Committer, "_resume", "lengths - 1 + num_new", "lengths + num_new"),
    (sampling_rows, "_own_drafted", "draft[:place]", "draft[: max(0, place - 1)]"),
    (sampling_rows, "_own_drafted", "counts.add(draft[place])", "counts.add(draft[0])"),
    (sampling_rows.RowsBuilder, "_gathered", "+ np.int32(1)", "+ np.int32(2)"),
    (
        sampling_rows.RowsBuilder,
        "_gather",
        "np.repeat(rows, counts)",
        "np.resize(rows, counts.sum())",
    ),
    (batch.BatchBuilder, "_mixed", "= drafts.ids[", "= drafts.ids[:, ::-1]["),
]
"""A draft token that is kept wrongly, a length that is off by one, bans and counts of another
place, noise of another position, parameters of another row, tokens in the wrong order."""


PLAIN_FAULTS: list[tuple[object, str, str, str]] = [
    (commit.Committer, "_verify", "~table.stops(rows, drawn)", "True"),
    (commit.Committer, "_verify", "<= -table.feed_end", "<= 1 - table.feed_end"),
    (commit.Committer, "_verify", "table.is_simple[rows] &", ""),
    (rows.RowTable, "stops", ".any((0, 1))", ".all(0).any(0)"),
    (rows.RowTable, "stops", "hits.any((0, 1))", "hits[0].any(0)"),
    (sampling_rows.RowsBuilder, "_gathered", "(kept_starts == starts).all()", "True"),
    (sampling_rows.RowsBuilder, "_gathered", "self._table.is_simple[rows].all()", "True"),
]
"""Stop ids that are missed, a length that is, log-probabilities that are left out, parameters of a
step with drafts of other lengths, or of other kinds of rows."""
STATE_FAULTS: list[tuple[object, str, str, str]] = [
    (commit.Committer, "_resume", "(sequence, count)", "(sequence, max(1, count - 1))"),
    (row_states.RowStates, "resume", "slots[full], blocks)", "slots[full - 1], blocks)"),
    (row_states.RowStates, "resume", "if place != num_new", "if place not in (num_new, 1)"),
    (row_states.RowStates, "plan", "= slots", "= slots[::-1]"),
    (row_states.RowStates, "plan", "ends[drafts.index] = False", "pass"),
]
"""States behind another token, a snapshot of them, slots that are lost, that change places, or that
are a snapshot already."""
MASK_FAULTS: list[tuple[object, str, str, str]] = [
    (grammar_rows.GrammarRow, "masks_behind", "if place < ", "if 0 < place < "),
    (grammar_rows.GrammarRow, "masks_behind", "rollback(num_taken)", "rollback(num_taken // 2)"),
]
"""A mask one token late, a matcher that keeps tokens of a draft."""


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"), FAULTS + PLAIN_FAULTS + STATE_FAULTS + MASK_FAULTS
)
def test_planted_faults_are_found(
    owner: Any, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    names: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, names)
    monkeypatch.setattr(owner, name, names[name])
    fault = (owner, name, old, new)
    run: Callable[[], object] = partial(run_mixed, 4, overlap=True)
    if fault in MASK_FAULTS:
        run = run_masked
    elif fault in PLAIN_FAULTS:
        run = partial(run_plain, 4)
    elif fault in STATE_FAULTS:
        run = partial(run_mixed, 4, overlap=True, slots=200)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        run()
