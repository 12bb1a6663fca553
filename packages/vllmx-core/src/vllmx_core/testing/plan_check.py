"""Checks that a `StepPlan` keeps its contract, for tests of whoever builds plans."""

from __future__ import annotations

import numpy as np

from vllmx_core.backend import LoadedInfo
from vllmx_core.plan import StepPlan


def check_plan(plan: StepPlan, info: LoadedInfo, vocab_size: int, num_last_ids: int) -> None:
    """Raises AssertionError that names the broken rule. `num_last_ids`: L of the step before, which
    negative tokens may refer to."""
    _check_arrays(plan)
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
    assert -(-int(plan.context_len.max()) // size) <= plan.block_table.shape[1], "B is too small"
    block = plan.block_table[row, plan.positions // size]
    assert ((block >= 0) & (block < info.num_kv_blocks)).all(), "a block does not exist"
    slots = block * size + plan.positions % size
    assert (plan.slots == slots).all(), "slots and block_table disagree"
    assert np.unique(plan.slots).shape == plan.slots.shape, "two tokens go to one slot"
    _check_sharing(plan, size)
    rising = np.diff(plan.logit_rows) > 0
    assert rising.all(), "logit_rows do not rise"
    if plan.num_logit_rows:
        assert plan.logit_rows[0] >= 0, "a logit row is negative"
        assert plan.logit_rows[-1] < plan.num_tokens, "a logit row is not below T"


def _check_arrays(plan: StepPlan) -> None:
    for name in ("tokens", "positions", "slots", "query_start", "context_len", "logit_rows"):
        array = getattr(plan, name)
        assert array.dtype == np.int32, f"{name} is {array.dtype}, not int32"
        assert array.ndim == 1, f"{name} has {array.ndim} dimensions"
        assert array.flags.c_contiguous, f"{name} is not contiguous"
    table = plan.block_table
    assert table.dtype == np.int32, f"block_table is {table.dtype}, not int32"
    assert table.ndim == 2, f"block_table has {table.ndim} dimensions"
    assert table.shape[1] == 1 or table.strides[1] == 4, "rows of block_table are not contiguous"
    assert table.shape[0] == plan.num_rows == plan.query_start.shape[0] - 1, "R differs"
    assert plan.positions.shape == plan.slots.shape == plan.tokens.shape, "T differs"


def _check_sharing(plan: StepPlan, size: int) -> None:
    """A block that is written in this step belongs to one row alone: others would see it change."""
    used = -(-plan.context_len // size)  # (R,)
    reads = np.arange(plan.block_table.shape[1]) < used[:, None]  # (R, B)
    blocks = plan.block_table[reads]
    assert blocks.min() >= 0, "a block of a row's context is negative"
    count = np.bincount(blocks)
    assert (count[np.unique(plan.slots // size)] == 1).all(), "a written block is shared"
