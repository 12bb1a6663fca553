"""The sampler, against `vllmx_core.reference.sampler` on logits that are known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.bounds import BOUNDS
from vllmx_core.plan import F32, LogitEdits, SamplingRows, StepPlan, StepResult, TokenCounts
from vllmx_core.reference.sampler import sample

from vllmx_testing.harness import Harness
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import table_model

SIZE = 131
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
ROWS = 24

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 20.0},
    "nearly greedy": {"temperature": 1e-4},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k 1": {"temperature": 1.5, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.5, "top_k": 1000},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "top_p tiny": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all filters": {"temperature": 1.3, "min_p": 0.01, "top_k": 20, "top_p": 0.9},
}


def logit_table(seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal((SIZE, SIZE)) * 3).astype(np.float32)


def one_step(tokens: list[int]) -> StepPlan:
    """A row for each token, every one of them a decode."""
    return make_plan([Row([token], 0, [i]) for i, token in enumerate(tokens)], 16)


def per_row(**columns: Any) -> SamplingRows:
    """Distinct seeds and positions unless given."""
    defaults = {"seed": np.arange(ROWS, dtype=np.uint64) << 33, "position": np.arange(ROWS) * 7 + 1}
    return sampling_rows(ROWS, **(defaults | columns))


class SamplerChecks(Harness):
    def sampled(self, table: F32, plan: StepPlan, rows: SamplingRows) -> StepResult:
        """One step of the backend under test over `table_model`."""
        model, source = table_model(table)
        with self.loaded(model, source, max_num_seqs=64) as loaded:
            return loaded.step(plan, rows).result()

    def judge(self, rows: SamplingRows, table: F32 | None = None) -> StepResult:
        """Compares with the oracle; returns what the oracle says."""
        table = logit_table() if table is None else table
        tokens = np.arange(ROWS, dtype=np.int32) * 5
        plan = one_step(tokens.tolist())
        expected, got = sample(table[tokens], rows, tokens), self.sampled(table, plan, rows)
        np.testing.assert_array_equal(got.ids, expected.ids)
        assert got.ids.dtype == np.int32
        if expected.logprobs is not None:
            assert got.logprobs is not None
            for name in ("rank", "top_ids"):
                np.testing.assert_array_equal(
                    getattr(got.logprobs, name), getattr(expected.logprobs, name), err_msg=name
                )
            for name in ("chosen", "top"):
                np.testing.assert_allclose(
                    getattr(got.logprobs, name),
                    getattr(expected.logprobs, name),
                    rtol=0,
                    atol=self.tolerance,
                    err_msg=name,
                )
        if expected.logits is not None:
            assert got.logits is not None
            np.testing.assert_allclose(got.logits, expected.logits, rtol=0, atol=self.tolerance)
        return expected

    @pytest.mark.parametrize("columns", CASES.values(), ids=CASES.keys())
    def test_one_setting_in_all_rows(self, columns: dict[str, Any]) -> None:
        self.judge(per_row(**columns))

    def test_another_setting_in_each_row(self) -> None:
        random = np.random.default_rng(5)
        self.judge(
            per_row(
                temperature=np.where(random.random(ROWS) < 0.3, 0, random.uniform(0.3, 2, ROWS)),
                top_k=np.where(random.random(ROWS) < 0.5, 0, random.integers(1, 40, ROWS)),
                top_p=np.where(random.random(ROWS) < 0.5, 1, random.uniform(0.1, 1, ROWS)),
                min_p=np.where(random.random(ROWS) < 0.5, 0, random.uniform(0.0, 0.3, ROWS)),
                seed=random.integers(0, 1 << 63, ROWS).astype(np.uint64) * np.uint64(2),
                position=random.integers(0, 1 << 30, ROWS),
                num_logprobs=random.integers(-1, 9, ROWS),
            )
        )

    def test_ties_go_to_the_lowest_id(self) -> None:
        table = np.zeros((SIZE, SIZE), np.float32)
        table[:, 40] = table[:, 90] = table[:, 130] = 2.5
        assert set(self.judge(per_row(), table).ids.tolist()) == {40}
        edge = per_row(temperature=1.0, top_k=2, num_logprobs=3)
        assert set(self.judge(edge, table).ids.tolist()) == {40, 90, 130}

    def test_draws_follow_the_softmax(self) -> None:
        """A thousand draws from four ids; chi-square under the 0.999 quantile of 3 degrees."""
        share = np.array([0.1, 0.2, 0.3, 0.4])
        table = np.full((SIZE, SIZE), -100.0, np.float32)
        table[0, [3, 50, 77, 130]] = np.log(share)
        plan = one_step([0] * 50)
        counts = np.zeros(SIZE)
        model, source = table_model(table)
        with self.loaded(model, source, max_num_seqs=64) as loaded:
            for repeat in range(20):
                rows = sampling_rows(
                    50, temperature=1.0, seed=17, position=np.arange(50) + 50 * repeat
                )
                counts += np.bincount(loaded.step(plan, rows).result().ids, minlength=SIZE)
        assert counts.sum() == counts[[3, 50, 77, 130]].sum() == 1000
        expected = 1000 * share
        assert (np.square(counts[[3, 50, 77, 130]] - expected) / expected).sum() < 16.3

    def test_a_draw_depends_on_nothing_but_its_row(self) -> None:
        table = logit_table(9)
        one = sampling_rows(1, temperature=0.9, seed=77, position=12, top_p=0.95)
        alone = self.sampled(table, one_step([8]), one)
        mates = per_row(temperature=[0.9] + [1.7] * (ROWS - 1), seed=77, position=12, top_p=0.95)
        among = self.sampled(table, one_step([8, *range(ROWS - 1)]), mates)
        assert among.ids[0] == alone.ids[0]

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_edits(self, temperature: float) -> None:
        random = np.random.default_rng(6)
        counts = random.integers(0, 9, ROWS)
        ids = [np.sort(random.permutation(SIZE)[:count]) for count in counts]
        values = random.uniform(-8, 8, counts.sum()).astype(np.float32)
        values[::3] = -np.inf
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        edits = LogitEdits(start, np.concatenate(ids).astype(np.int32), values)
        self.judge(per_row(temperature=temperature, edits=edits, num_logprobs=4))

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_masks(self, temperature: float) -> None:
        random = np.random.default_rng(7)
        allowed = random.random((3, 160)) < 0.1
        allowed[2] = False  # nothing at all: the row answers -1
        masks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
        index = random.integers(-1, 3, ROWS).astype(np.int32)
        index[:4] = [-1, 0, 1, 2]
        rows = per_row(temperature=temperature, masks=masks, mask_index=index, num_logprobs=2)
        expected = self.judge(rows)
        assert ((expected.ids == -1) == (index == 2)).all()

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize(
        "penalties",
        [
            {"repetition_penalty": 1.7},
            {"frequency_penalty": 0.9},
            {"presence_penalty": -1.5},
            {"repetition_penalty": 0.6, "frequency_penalty": -0.5, "presence_penalty": 1.0},
        ],
    )
    def test_penalties(self, temperature: float, penalties: dict[str, float]) -> None:
        """Prompt-only ids, counted ids, and the pending token, the likeliest: listed or not."""
        random = np.random.default_rng(8)
        table = logit_table(8)
        np.fill_diagonal(table, table.max(axis=1) + np.float32(0.3))
        ids = [np.argsort(-table[5 * row])[row % 2 : 9] for row in range(ROWS)]
        sizes = [len(row) for row in ids]
        counts = TokenCounts(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            np.concatenate(ids).astype(np.int32),
            random.integers(0, 4, sum(sizes)).astype(np.int32),
            np.arange(ROWS) % 3 == 0,
        )
        rows = per_row(temperature=temperature, counts=counts, num_logprobs=3, **penalties)
        self.judge(rows, table)

    @pytest.mark.parametrize("temperature", [0.0, 1e-5, 100.0])
    @pytest.mark.parametrize("factor", ["low", "high"])
    def test_the_bounds_of_users_keep_logits_finite(self, temperature: float, factor: str) -> None:
        """All penalties at the ends of `BOUNDS`, on logits as wide as a model's, some masked."""
        bound = {name: getattr(BOUNDS[name], factor) for name in PENALTIES}
        table = logit_table(11) * np.float32(1e4)
        ids = np.arange(SIZE, dtype=np.int32)
        start = np.arange(ROWS + 1, dtype=np.int32) * SIZE
        counts = TokenCounts(
            start,
            np.tile(ids, ROWS),
            np.full(SIZE * ROWS, 1 << 20, np.int32),
            np.zeros(ROWS, np.bool_),
        )
        edits = LogitEdits(
            start, np.tile(ids, ROWS), np.where(np.tile(ids, ROWS) % 2, np.float32(-np.inf), 100)
        )
        rows = per_row(temperature=temperature, counts=counts, edits=edits, **bound)
        assert (self.judge(rows, table).ids % 2 == 0).all()

    def test_targets_are_scored(self) -> None:
        target = np.where(np.arange(ROWS) % 2 == 0, np.arange(ROWS) * 3, -1)
        rows = per_row(temperature=0.5, target=target, num_logprobs=np.arange(ROWS) % 4)
        expected = self.judge(rows)
        assert (expected.ids[::2] == target[::2]).all()

    def test_rows_come_back_whole(self) -> None:
        """Logits that are asked for come back as they were computed, whatever edits say."""
        edits = LogitEdits(
            np.arange(ROWS + 1, dtype=np.int32),
            np.full(ROWS, 7, np.int32),
            np.full(ROWS, -100, np.float32),
        )
        whole = np.array([0, 5, 6, ROWS - 1], np.int32)
        rows = per_row(temperature=0.8, edits=edits, num_logprobs=np.arange(ROWS) % 3, whole=whole)
        expected = self.judge(rows)
        assert expected.logits is not None
        np.testing.assert_array_equal(expected.logits, logit_table()[whole * 5])

    def test_a_broken_row_breaks_alone(self) -> None:
        """NaN logits answer -1, whose successor is harmless."""
        table = logit_table(10)
        plan, rows = one_step(list(range(ROWS))), per_row(temperature=0.8, num_logprobs=1)
        whole = self.sampled(table, plan, rows)
        table[[2, 11]] = np.nan
        model, source = table_model(table)
        with self.loaded(model, source, max_num_seqs=64) as loaded:
            broken = loaded.step(plan, rows).result()
            follow = make_plan([Row([-3], 1, [2]), Row([-4], 1, [3])], 16)
            after = loaded.step(follow, sampling_rows(2)).result()
        assert np.flatnonzero(broken.ids < 0).tolist() == [2, 11]
        good = np.delete(np.arange(ROWS), [2, 11])
        np.testing.assert_array_equal(broken.ids[good], whole.ids[good])
        assert broken.ids[3] not in (2, 11)
        assert after.ids[1] == np.argmax(table[broken.ids[3]])
