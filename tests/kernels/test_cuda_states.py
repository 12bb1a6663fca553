"""Short convolutions and recurrences on the emulator, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.ops.recurrence import RecurrenceSpec, RecurrenceWeights, recurrence
from vllmx_core.ops.short_conv import ShortConvSpec, short_conv
from vllmx_core.plan import I32, StepPlan
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.states import keys_of
from vllmx_testing.cuda.emulator import Emulator

from .cuda_arrays import NUMPY_TYPES, Array, assert_near, inout, normal, on_device, options, wide

SLOTS, PADDING = 9, 7.0
"""Slots of a pool, and numbers behind a layer's states in a slot."""
LENGTHS = {
    "one token": ([1], [3], [3], [-1]),
    "one row": ([3], [-1], [4], [6, 7, -1]),
    "rows": ([2, 1, 4, 1], [-1, 2, 5, 5], [1, 2, 0, 3], [6, -1, -1, 7, -1, 8, -1, -1]),
}
"""Tokens of each row, the slots that it reads and leaves, and those that keep the
states after other tokens; two rows read the same one."""


def plan_of(name: str) -> StepPlan:
    counts, source, target, after = LENGTHS[name]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    none = np.zeros(0, np.int32)
    return StepPlan(
        none,
        none,
        (),
        start,
        np.array(counts, np.int32),
        (),
        none,
        np.array(source, np.int32),
        np.array(target, np.int32),
        np.array(after, np.int32),
    )


def ints(values: Any) -> I32:
    return on_device(values, np.int32)


def slots(rng: np.random.Generator, size: int) -> tuple[Array, Array]:
    """(slots, size and what lies behind it), on the device and as it was."""
    before = np.full((SLOTS, size + 3), PADDING)
    before[:, :size] = rng.standard_normal((SLOTS, size)).astype(np.float32)
    return inout(before, np.float32), before


def padded(plan: StepPlan) -> tuple[Array, Array, Array, Array]:
    """query_start, state_from and state_to with a row of padding behind the others, and
    state_after with a token."""
    assert plan.state_from is not None
    assert plan.state_to is not None
    assert plan.state_after is not None
    return (
        ints([*plan.query_start, plan.query_start[-1]]),
        ints([*plan.state_from, -1]),
        ints([*plan.state_to, -1]),
        ints([*plan.state_after, -1]),
    )


def check_slots(found: Array, expected: Array, size: int, dtype: str) -> None:
    assert_near(found[:, :size], expected, dtype)
    np.testing.assert_array_equal(found[:, size:], PADDING)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(
    ("name", "channels", "kernel", "biased", "silu"),
    [
        ("one token", 1, 2, 0, 0),
        ("rows", 33, 4, 1, 1),
        ("rows", 261, 3, 0, 1),
    ],
)
def test_short_conv(
    emulator: Emulator, dtype: str, name: str, channels: int, kernel: int, biased: int, silu: int
) -> None:
    rng, plan = np.random.default_rng(channels), plan_of(name)
    tokens, size = int(plan.query_start[-1]), (kernel - 1) * channels
    pad = int(name == "rows")
    x = normal(rng, (tokens + pad, channels), dtype)
    w, bias = normal(rng, (channels, kernel), "f32"), normal(rng, (channels,), "f32")
    pool, before = slots(rng, size)
    y = inout(np.full(x.shape, PADDING), x.dtype)
    start, source, target, after = padded(plan)
    token_rows = ints(
        [*np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start)), *[-1] * pad]
    )
    arguments = [
        x, w, bias if biased else None, token_rows, start, source, pool, y, channels, kernel, silu,
        size + 3,
    ]  # fmt: skip
    shape = {"count": tokens + pad, "width": channels}
    emulator.launch(KERNELS["short_conv"].variant(**options(dtype)), shape, arguments)
    arguments = [
        x, token_rows, start, source, target, after, pool, channels, kernel, size + 3,
    ]  # fmt: skip
    emulator.launch(KERNELS["short_conv_keep"].variant(**options(dtype)), shape, arguments)
    states = before[:, None, :size].reshape(SLOTS, 1, kernel - 1, channels)
    spec = ShortConvSpec(0, kernel, "silu" if silu else None)
    want = short_conv(
        wide(x[:tokens]), wide(w).reshape(-1), wide(bias) if biased else None, spec, plan, states
    )
    assert_near(y[:tokens], want, dtype, scale=3)
    np.testing.assert_array_equal(wide(y[tokens:]), PADDING)
    check_slots(pool, states.reshape(SLOTS, -1), size, dtype)


RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "delta, vectors of 8": ("one row", {"rule": "delta", "key_size": 16, "value_size": 40}),
    "delta, odd": ("rows", {"rule": "delta", "key_size": 33, "value_size": 5, "tiled": True}),
    "delta, a decay a channel": ("rows", {
        "rule": "delta", "key_size": 36, "value_size": 32, "decay": "channel",
    }),
    "delta, wide keys": ("rows", {"rule": "delta", "key_size": 128, "value_size": 33}),
    "ssd": ("rows", {"rule": "ssd", "key_size": 66, "value_size": 34, "scale": 0.3}),
    "ssd, limits": ("rows", {
        "rule": "ssd", "key_size": 8, "value_size": 3, "dt_min": 0.4, "dt_max": 0.8,
    }),
}  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("case", RULES)
def test_recurrence(emulator: Emulator, dtype: str, case: str) -> None:
    name, features = RULES[case]
    rng, plan = np.random.default_rng(len(case)), plan_of(name)
    keeps = int(case != "ssd, limits")
    if not keeps:
        plan.state_after = np.full(int(plan.query_start[-1]), -1, np.int32)
    spec = RecurrenceSpec(0, 4, 2, **features)
    if spec.key_size % 8 == 0 and name == "rows":
        spec = RecurrenceSpec(0, 3, 1, **features)
    tokens, heads, delta = int(plan.query_start[-1]), spec.num_heads, spec.rule == "delta"
    size = heads * spec.key_size * spec.value_size
    qkv, a = (normal(rng, (tokens, width), dtype) for width in (spec.width, spec.num_decays))
    b = normal(rng, (tokens, heads), dtype) if delta else None
    a_log, d = (normal(rng, (heads,), "f32", 0.3) for _ in range(2))
    dt_bias = normal(rng, (spec.num_decays,), "f32")
    pool, before = slots(rng, size)
    out = inout(np.zeros((tokens, heads * spec.value_size)), qkv.dtype)
    vec = vector_width(spec.key_size, spec.width)
    pad = int(name == "rows")
    arguments = [
        qkv, a, b, a_log, dt_bias, None if delta else d, *padded(plan), pool, out, heads,
        spec.num_key_heads, spec.key_size, spec.value_size, int(spec.decay == "channel"),
        int(spec.tiled), size + 3, spec.scale, spec.beta, spec.norm_eps, spec.dt_min, spec.dt_max,
    ]  # fmt: skip
    shape = {
        "rows": plan.num_rows + pad,
        "heads": heads,
        "keys": spec.key_size,
        "values": spec.value_size,
    }
    variant = KERNELS["recurrence"].variant(
        **options(dtype, VX_KEYS=keys_of(spec.key_size), VX_VEC=vec, VX_KEEPS=keeps)
    )
    emulator.launch(variant, shape, arguments)
    states = before[:, :size].reshape(SLOTS, heads, spec.key_size, spec.value_size).copy()
    weights = RecurrenceWeights(wide(a_log), wide(dt_bias), None if delta else wide(d))
    want = recurrence(
        wide(qkv), wide(a), None if b is None else wide(b), spec, weights, plan, states
    )
    assert_near(out, want, dtype, scale=5)
    check_slots(pool, states.reshape(SLOTS, -1), size, "f32" if dtype == "f32" else "f16")
