"""The tokens of a step through a recurrent layer's states by our own Metal kernel, which keeps a
state in registers from a row's first token to its last. Never run on Metal so far; `kernel_choice`
compares it with MLX's own ops before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
from vllmx_core.ops.recurrence import TokenInputs

from vllmx_metal.paged import compiled

SIMDS = 8
COLS = 4
"""Columns of a state that a simdgroup keeps; those of a threadgroup are a line of memory."""
INPUTS = (
    "q",
    "k",
    "v",
    "decay",
    "strength",
    "states",
    "source",
    "first_token",
    "num_tokens",
    "left_at",
)
OUTPUTS = ("out", "left")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step."""

    source: mx.array  # (R,) slots, -1 where a row begins
    first_token: mx.array  # (R,)
    num_tokens: mx.array  # (R,)
    left_at: mx.array  # (T,) place of the states behind each token among those that are left, or -1
    num_left: int


@cache
def kernel() -> Callable[..., list[mx.array]]:
    return compiled("recurrence", INPUTS, OUTPUTS)


def run(
    tokens: TokenInputs, rows: Rows, states: mx.array, *, delta: bool
) -> tuple[mx.array, mx.array]:
    """states (slots, H, Dk, Dv) -> (T, H, Dv), and the states (num_left, H, Dk, Dv) behind the rows
    and behind other tokens that keep them."""
    count, heads, key_size = tokens.k.shape
    value_size, num_rows = tokens.v.shape[2], len(rows.source)
    out, left = kernel()(
        inputs=[
            *tokens,
            states,
            rows.source,
            rows.first_token,
            rows.num_tokens,
            rows.left_at,
        ],
        template=[
            ("H", heads),
            ("DK", key_size),
            ("DV", value_size),
            ("SIMDS", SIMDS),
            ("COLS", COLS),
            ("CHANNEL", tokens.decay.shape[2] > 1),
            ("DELTA", delta),
        ],
        grid=(-(-value_size // (SIMDS * COLS)) * SIMDS * 32, heads, num_rows),
        threadgroup=(SIMDS * 32, 1, 1),
        output_shapes=[(count, heads, value_size), (rows.num_left, heads, key_size, value_size)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return out, left
