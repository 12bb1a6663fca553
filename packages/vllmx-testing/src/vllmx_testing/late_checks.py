"""A step in two halves (`LoadedModel.forward`, then `sample`) equals a whole step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.plan import LogitEdits, SamplingRows, StepPlan, StepResult, TokenCounts

from vllmx_testing.harness import PAGE, VOCAB, Harness, mixed_steps
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder


def _edits(count: int) -> LogitEdits:
    """Each row bans one id and favours another."""
    ids = np.stack([np.arange(count) % VOCAB, (np.arange(count) + 5) % VOCAB], axis=1)
    values = np.tile(np.array([-np.inf, 3.0], np.float32), count)
    start = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    return LogitEdits(start, ids.astype(np.int32).ravel(), values)


def _counts(count: int) -> TokenCounts:
    """Each row saw every id a few times, and every other one feeds one that nobody has counted."""
    ids = np.tile(np.arange(VOCAB, dtype=np.int32), count)
    seen = (np.arange(count * VOCAB, dtype=np.int32) * 7) % 5
    start = np.arange(0, count * VOCAB + 1, VOCAB, dtype=np.int32)
    return TokenCounts(start, ids, seen, np.arange(count) % 2 == 0)


def _masks(count: int) -> dict[str, Any]:
    """Two masks in turn, and every third row without one."""
    masks = np.array([[0b1010101010101010101], [0b0111000111000111000]], np.uint32)
    index = np.arange(count, dtype=np.int32) % 3
    return {"mask_index": np.where(index == 2, -1, index).astype(np.int32), "masks": masks}


def rows_of(kind: str, count: int) -> SamplingRows:
    """Sampling rows of one kind for a step with so many logit rows."""
    own = {"seed": np.arange(count) + 3, "position": np.arange(count) * 7 + 1}
    columns: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.01},
        "edits": {"edits": _edits(count)},
        "masks": {"temperature": 0.7, **_masks(count)},
        "penalties": {
            "repetition_penalty": 1.3,
            "frequency_penalty": 2.0,
            "presence_penalty": -0.5,
            "counts": _counts(count),
        },
        "logprobs": {"temperature": 1.0, "num_logprobs": 4},
        "scored": {"target": np.arange(count) % VOCAB, "num_logprobs": 2},
        "all": {
            "temperature": 0.8,
            "num_logprobs": VOCAB,
            "presence_penalty": 0.3,
            "counts": _counts(count),
            "edits": _edits(count),
            **_masks(count),
            "whole": np.arange(0, count, 2, dtype=np.int32),
        },
    }
    rows = sampling_rows(count, **own, **{k: v for k, v in columns[kind].items() if k != "masks"})
    rows.masks = columns[kind].get("masks")
    return rows


KINDS = ("greedy", "drawn", "edits", "masks", "penalties", "logprobs", "scored", "all")


def assert_equal(got: StepResult, wanted: StepResult, kind: str = "") -> None:
    """Compares two results to the bit: both come from the same backend and the same batch."""
    np.testing.assert_array_equal(got.ids, wanted.ids, err_msg=kind)
    assert (got.logprobs is None) == (wanted.logprobs is None)
    np.testing.assert_array_equal(got.logits, wanted.logits, err_msg=kind)
    if got.logprobs is not None and wanted.logprobs is not None:
        for name in ("chosen", "rank", "top_ids", "top"):
            np.testing.assert_array_equal(
                getattr(got.logprobs, name),
                getattr(wanted.logprobs, name),
                err_msg=f"{kind} {name}",
            )


def decodes(*tokens: int, position: int = 0) -> StepPlan:
    """A row for each token, at the same position of sequences 0, 1, ..."""
    return make_plan([Row([token], position, [i]) for i, token in enumerate(tokens)], PAGE)


class LateChecks(Harness):
    @pytest.mark.parametrize("enforce_eager", [False, True])
    def test_halves_of_a_step_are_the_step(self, enforce_eager: bool) -> None:
        """Both forms agree for prompts and chunks side by side, and for decodes alone. No two steps
        in a row have the same parameters, which may still lie on the device."""
        with self.loaded(*decoder(), enforce_eager=enforce_eager) as loaded:
            for plan in (make_plan(mixed_steps(3)[0], PAGE), decodes(8, 9, 1)):
                asked = {kind: rows_of(kind, plan.num_logit_rows) for kind in KINDS}
                whole = {kind: loaded.step(plan, rows).result() for kind, rows in asked.items()}
                for kind, rows in asked.items():
                    assert_equal(loaded.forward(plan).sample(rows).result(), whole[kind], kind)

    def test_a_step_is_sampled_when_the_one_before_was_read(self) -> None:
        """The forward pass is fed ids that are on the device alone; the masks of its rows know
        them."""
        model, source = decoder()
        wanted: list[StepResult] = []
        with self.loaded(model, source) as loaded:
            for first in (self._masked(3), None):
                ids = wanted[-1].ids.tolist() if wanted else [1, 2, 3]
                rows = first or self._masked(3, ids)
                wanted.append(loaded.step(decodes(*ids, position=len(wanted)), rows).result())
        with self.loaded(model, source) as loaded:
            before = loaded.step(decodes(1, 2, 3), self._masked(3))
            pending = loaded.forward(decodes(-1, -2, -3, position=1))
            assert_equal(before.result(), wanted[0])
            after = pending.sample(self._masked(3, wanted[0].ids.tolist()))
            last = loaded.step(decodes(-3, -1, -2, position=2), sampling_rows(3))
            assert_equal(after.result(), wanted[1])
            assert (last.result().ids >= 0).all()

    def _masked(self, count: int, last: list[int] | None = None) -> SamplingRows:
        """Everything but a few ids that depend on the last ones is allowed."""
        masks = np.full((count, 1), (1 << VOCAB) - 1, np.uint32)
        for i, token in enumerate(last or []):
            masks[i] &= ~np.uint32(0b111 << (token % 16))
        rows = sampling_rows(count, temperature=0.5, seed=np.arange(count))
        rows.mask_index, rows.masks = np.arange(count, dtype=np.int32), masks
        return rows

    def test_halves_and_whole_steps_take_turns(self) -> None:
        """Chains of decodes, every step of which is fed by the one before while that is in
        flight."""
        chains = []
        for late in ([False] * 6, [True, False, True, True, False, True]):
            with self.loaded(*decoder()) as loaded:
                chain, plan, flying = [], decodes(4, 5, 6, 7, 8), None
                for position, halves in enumerate(late):
                    rows = sampling_rows(5, temperature=1.0, seed=range(5), position=position)
                    pending = loaded.forward(plan) if halves else None
                    if flying is not None and pending is not None:
                        chain.append(flying.result().ids.tolist())
                    handle = pending.sample(rows) if pending else loaded.step(plan, rows)
                    if flying is not None and pending is None:
                        chain.append(flying.result().ids.tolist())
                    flying = handle
                    plan = decodes(-1, -2, -3, -4, -5, position=position + 1)
                assert flying is not None
                chains.append([*chain, flying.result().ids.tolist()])
        assert chains[0] == chains[1]

    def test_a_half_step_without_logit_rows(self) -> None:
        with self.loaded(*decoder()) as loaded:
            plan = make_plan([Row([1, 2, 3], 0, [0], "none")], PAGE)
            assert loaded.forward(plan).sample(sampling_rows(0)).result().ids.size == 0
            split = self.step_ids(loaded, [Row([4], 3, [0])])
            assert split == self.step_ids(loaded, [Row([1, 2, 3, 4], 0, [1])])

    def test_arrays_of_a_half_step_may_be_reused_at_once(self) -> None:
        with self.loaded(*decoder()) as loaded:
            plan, rows = make_plan([Row([1, 2, 3], 0, [0], "all")], PAGE), rows_of("all", 3)
            expected = loaded.step(plan, rows).result()
            pending = loaded.forward(plan)
            for array in (plan.tokens, plan.positions, *plan.slots, *plan.block_tables):
                array[...] = 7
            handle = pending.sample(rows)
            assert rows.edits is not None
            assert rows.masks is not None
            rows.target[...] = rows.edits.ids[...] = 0
            rows.masks[...] = 0
            assert_equal(handle.result(), expected)

    def test_halves_out_of_their_order_are_refused(self) -> None:
        with self.loaded(*decoder()) as loaded:
            plan, rows = decodes(1, 2), sampling_rows(2)
            pending: Any = loaded.forward(plan)
            for enqueue in (lambda: loaded.forward(plan), lambda: loaded.step(plan, rows)):
                with pytest.raises(AssertionError, match=r"waits for sample\(\)"):
                    enqueue()
            with pytest.raises(AssertionError, match=r"before sample\(\)"):
                pending.result()
            handle = pending.sample(rows)
            with pytest.raises(AssertionError, match=r"sample\(\) was called twice"):
                pending.sample(rows)
            second = loaded.forward(plan)
            assert handle.result().ids.size == 2
            with pytest.raises(AssertionError, match="3 rows, L = 2"):
                second.sample(sampling_rows(3))
            second.sample(rows).result()
            loaded.forward(plan)  # left in flight: closing does not mind

    def test_elapsed_time_of_both_halves_is_reported(self) -> None:
        with self.loaded(*decoder()) as loaded:
            plan = make_plan([Row([1], 0, [0])], PAGE)
            handle = loaded.forward(plan).sample(sampling_rows(1))
            assert 0 < handle.result().elapsed_s < 60
