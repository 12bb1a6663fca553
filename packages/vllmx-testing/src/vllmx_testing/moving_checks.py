"""Blocks and states that leave a model and come into another one that was loaded alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import HasMovableCache, LoadedModel, MovableCache
from vllmx_core.model import Model
from vllmx_core.plan import I32, StepPlan
from vllmx_core.weights.part import WeightSource

from vllmx_testing.attention_checks import attention_model
from vllmx_testing.cache_group_checks import WINDOWS, grouped_model, grouped_steps
from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, mixed_steps
from vllmx_testing.plans import make_plan
from vllmx_testing.state_checks import recurrent_model, with_slots

_TEXTS = [np.random.default_rng(6).integers(0, VOCAB - 1, n).tolist() for n in (9, 58, 37)]


class MovingChecks(Harness):
    """A backend without `HasMovableCache` skips these."""

    @pytest.mark.parametrize("dtype", ["auto", "int8", "fp8", "q4", "q8,q4"])
    def test_blocks_move(self, dtype: str) -> None:
        if dtype != "auto" and dtype not in self.kv_dtypes:
            pytest.skip(f"no KV cache of {dtype}")
        model, source = attention_model(windows=(None, None), rotary_dim=16, num_kv_heads=2)
        plans = [make_plan(rows, PAGE) for rows in mixed_steps()]
        self._check_moved(model, source, plans, kv_cache_dtype=dtype)

    def test_blocks_of_cache_groups_move(self) -> None:
        model, source, windows = grouped_model(WINDOWS["an empty place"])
        steps = grouped_steps(_TEXTS, windows, 20)
        plans = [make_plan(rows, PAGE) for rows in steps]
        self._check_moved(model, source, plans, group_caches=True)

    def test_states_move(self) -> None:
        if {"short_conv", "recurrence"}.intersection(self.missing_ops):
            pytest.skip("no recurrent layers")
        model, source = recurrent_model()
        plans = [make_plan(rows, PAGE) for rows in with_slots(mixed_steps())]
        self._check_moved(model, source, plans, num_state_slots=20)

    def _check_moved(
        self, model: Model, source: WeightSource, plans: list[StepPlan], **options: Any
    ) -> None:
        """The second half of the steps gives the same bits behind blocks that went through bytes,
        into other places."""
        half = len(plans) // 2
        with self.loaded(model, source, **options) as first:
            for plan in plans[:half]:
                all_logprobs(first, plan, VOCAB)
            moved = _movable(first)
            order = np.random.default_rng(5).permutation(first.info.num_kv_blocks).astype(np.int32)
            blocks = moved.blocks.copy_out(np.arange(len(order), dtype=np.int32))
            slots = np.arange(first.info.num_state_slots, dtype=np.int32)
            states = None if moved.states is None else moved.states.copy_out(slots)
            expected = [all_logprobs(first, plan, VOCAB) for plan in plans[half:]]
            content, kept = (
                blocks.result().copy(),
                None if states is None else states.result().copy(),
            )
        with self.loaded(model, source, **options) as second:
            moved = _movable(second)
            some = len(order) // 3
            moved.blocks.copy_in(order[:some], content[:some])
            moved.blocks.copy_in(order[some:], content[some:])
            if moved.states is not None and kept is not None:
                moved.states.copy_in(slots[::-1].copy(), kept)
            for plan, wanted in zip(plans[half:], expected, strict=True):
                found = all_logprobs(second, _renamed(plan, order, len(slots)), VOCAB)
                np.testing.assert_array_equal(found, wanted)
            back = moved.blocks.copy_out(order[:3]).result()
            assert back.shape == content[:3].shape


def _movable(loaded: LoadedModel) -> MovableCache:
    if not isinstance(loaded, HasMovableCache):
        pytest.skip(f"{loaded.info.backend} moves no blocks")
    return loaded.movable_cache


def _renamed(plan: StepPlan, order: I32, num_slots: int) -> StepPlan:
    """The plan for blocks that lie at `order[block]`, and slots from the last one on."""
    tables = tuple(order[table] for table in plan.block_tables)
    slots = tuple(order[one // PAGE] * PAGE + one % PAGE for one in plan.slots)
    plan = replace(plan, block_tables=tables, slots=slots)
    if plan.state_from is None or plan.state_to is None:
        return plan
    source = np.where(plan.state_from < 0, -1, num_slots - 1 - plan.state_from)
    return replace(plan, state_from=source, state_to=num_slots - 1 - plan.state_to)
