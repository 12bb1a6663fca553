"""Checks that a `StepPlan` keeps its contract, for tests of whoever builds plans."""

from __future__ import annotations

import numpy as np
from vllmx_core.backend import LoadedInfo
from vllmx_core.plan import I32, StepPlan


def check_plan(plan: StepPlan, info: LoadedInfo, vocab_size: int, num_last_ids: int) -> None:
    """Raises AssertionError that names the broken rule. `num_last_ids`: L of the step before, which
    negative tokens may refer to."""
    _check_arrays(plan, len(info.cache_windows))
    size = info.block_size
    assert 0 < plan.num_tokens <= info.max_num_batched_tokens, f"T = {plan.num_tokens}"
    assert plan.num_logit_rows <= info.max_logit_rows, f"L = {plan.num_logit_rows}"
    assert plan.query_start[0] == 0, "query_start does not begin with 0"
    assert plan.query_start[-1] == plan.num_tokens, "query_start does not end with T"
    lengths = np.diff(plan.query_start)
    assert (lengths > 0).all(), "a row has no token"
    assert (plan.tokens < vocab_size).all(), "a token id is not below the vocabulary"
    assert (plan.tokens >= -num_last_ids).all(), "a token refers beyond the step before"
    row = np.repeat(np.arange(plan.num_rows), lengths)  # (T,)
    expected = np.arange(plan.num_tokens) - plan.query_start[row + 1] + plan.context_len[row]
    assert (plan.positions == expected).all(), "positions do not end at context_len - 1"
    assert (plan.positions >= 0).all(), "a row has more tokens than context"
    widest = plan.block_tables[0].shape[1]
    assert -(-int(plan.context_len.max()) // size) <= widest, "B is too small"
    for table, slots in zip(plan.block_tables, plan.slots, strict=True):
        block = table[row, plan.positions // size]
        assert ((block >= 0) & (block < info.num_kv_blocks)).all(), "a block does not exist"
        expected = block * size + plan.positions % size
        assert (slots == expected).all(), "slots and block_tables disagree"
    slots = np.concatenate(plan.slots)
    assert np.unique(slots).shape == slots.shape, "two tokens go to one slot"
    _check_sharing(plan, info)
    _check_states(plan, info)
    rising = np.diff(plan.logit_rows) > 0
    assert rising.all(), "logit_rows do not rise"
    if plan.num_logit_rows:
        assert plan.logit_rows[0] >= 0, "a logit row is negative"
        assert plan.logit_rows[-1] < plan.num_tokens, "a logit row is not below T"


def _check_arrays(plan: StepPlan, num_groups: int) -> None:
    names = ("tokens", "positions", "query_start", "context_len", "logit_rows")
    arrays = [(name, getattr(plan, name)) for name in names]
    for name, array in arrays + [("slots", slots) for slots in plan.slots]:
        assert array.dtype == np.int32, f"{name} is {array.dtype}, not int32"
        assert array.ndim == 1, f"{name} has {array.ndim} dimensions"
        assert array.flags.c_contiguous, f"{name} is not contiguous"
    assert len(plan.slots) == len(plan.block_tables) == num_groups, "G differs"
    widths = set()
    for table in plan.block_tables:
        assert table.dtype == np.int32, f"a block table is {table.dtype}, not int32"
        assert table.ndim == 2, f"a block table has {table.ndim} dimensions"
        assert table.shape[1] == 1 or table.strides[1] == 4, "rows of a table are not contiguous"
        assert table.shape[0] == plan.num_rows == plan.query_start.shape[0] - 1, "R differs"
        widths.add(table.shape[1])
    assert len(widths) == 1, "B differs"
    for slots in plan.slots:
        assert plan.positions.shape == slots.shape == plan.tokens.shape, "T differs"


def _check_states(plan: StepPlan, info: LoadedInfo) -> None:
    """A slot that a row leaves its states in is that row's alone."""
    source, target = plan.state_from, plan.state_to
    if not info.num_state_slots:
        assert source is None and target is None, "slots of states, and the model has none"  # noqa: PT018
        return
    assert source is not None, "state_from is missing"
    assert target is not None, "state_to is missing"
    for name, array in (("state_from", source), ("state_to", target)):
        assert array.dtype == np.int32, f"{name} is {array.dtype}, not int32"
        assert array.shape == plan.context_len.shape, f"{name} has shape {array.shape}, not (R,)"
        assert (array < info.num_state_slots).all(), f"{name} names a slot that does not exist"
    assert (source >= -1).all(), "state_from is below -1"
    assert (target >= 0).all(), "state_to is negative"
    begins = plan.positions[plan.query_start[:-1]] == 0
    assert ((source == -1) == begins).all(), "state_from is not -1 exactly where a sequence begins"
    assert np.unique(target).shape == target.shape, "two rows leave their states in one slot"
    others = target[:, None] == source  # (R, R) row of the first writes what the second reads
    np.fill_diagonal(others, False)
    assert not others.any(), "a row reads a slot that another one writes"
    if plan.state_after is not None:
        assert plan.state_after.shape == plan.tokens.shape, "state_after is not (T,)"
        last = plan.state_after[plan.query_start[1:] - 1]
        assert (last == -1).all(), "state_after names a slot for a row's last token"
        keeps = np.maximum.reduceat(plan.state_after, plan.query_start[:-1]) >= 0  # (R,)
        assert (source != target)[keeps].all(), "a row that keeps states writes the slot it reads"
        _check_states_after(plan.state_after, np.concatenate([source, target]), info)


def _check_states_after(after: I32, others: I32, info: LoadedInfo) -> None:
    assert info.keeps_states_after, "state_after, and the backend cannot keep them"
    assert after.dtype == np.int32, f"state_after is {after.dtype}, not int32"
    assert (after >= -1).all(), "state_after is below -1"
    assert (after < info.num_state_slots).all(), "state_after names a slot that does not exist"
    kept = after[after >= 0]
    assert np.unique(kept).shape == kept.shape, "state_after names a slot twice"
    assert not np.isin(kept, others).any(), "state_after names a slot of state_from or state_to"


def _check_sharing(plan: StepPlan, info: LoadedInfo) -> None:
    """A block that is written in this step belongs to one row of one group alone: others would see
    it change. What fell out of a window belongs to nobody."""
    size, owned = info.block_size, []
    used = -(-plan.context_len // size)  # (R,)
    column = np.arange(plan.block_tables[0].shape[1])
    for table, window in zip(plan.block_tables, info.cache_windows, strict=True):
        held = column < used[:, None]  # (R, B)
        if window is not None:
            first = plan.positions[plan.query_start[:-1]] - window + 1  # (R,)
            held &= column >= (np.maximum(first, 0) // size)[:, None]
        owned.append(table[held])
    blocks = np.concatenate(owned)
    assert blocks.min() >= 0, "a block of a row's context is negative"
    count = np.bincount(blocks)
    written = np.unique(np.concatenate(plan.slots) // size)
    assert (count[written] == 1).all(), "a written block is shared"
