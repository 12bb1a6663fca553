"""Chooses which kernels of our own are used: as the environment says, or where a small case gives
the same as MLX's own ops."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from vllmx_core.cache.state_rows import StateRows
from vllmx_core.errors import ConfigError
from vllmx_core.ops.attention import AttentionSpec
from vllmx_core.ops.recurrence import TokenInputs

from vllmx_metal.kv_cache import LayerPages, Pages
from vllmx_metal.paged import PART, decode_rows, paged_decode
from vllmx_metal.paged_prefill import PrefillTiles, paged_prefill
from vllmx_metal.recurrence_kernel import run
from vllmx_metal.recurrent import on_device, side_by_side

logger = logging.getLogger("vllmx.metal")

DECODE_SWITCH = "VLLMX_METAL_PAGED_KERNEL"
"""1: use the kernel without a probe, 0: never; unset: where the probe finds it right."""
PREFILL_SWITCH = "VLLMX_METAL_PAGED_PREFILL"
"""1: use the kernel, 0 or unset: never, for nobody has measured yet which way is faster."""
RECURRENCE_SWITCH = "VLLMX_METAL_RECURRENCE"
"""1: use the kernel without a probe, 0: never; unset: where the probe finds it right."""
_TOLERANCE = 0.02
"""bfloat16 rounds the result to 0.004."""


@dataclass(frozen=True, slots=True)
class OwnKernels:
    """The kernels of ours that attend, MLX's own attention doing the rest over gathered pages, and
    whether one of them steps through the states of recurrent layers."""

    decode: bool = False
    prefill: bool = False
    recurrence: bool = False


def choose_kernels(dtype: mx.Dtype) -> OwnKernels:
    """Raises ConfigError for a switch that is neither 0 nor 1."""
    decode, prefill = _switch(DECODE_SWITCH), _switch(PREFILL_SWITCH)
    if decode is None:
        decode = _is_right("paged decode", "pages are gathered", lambda: decode_difference(dtype))
    recurrence = _switch(RECURRENCE_SWITCH)
    if recurrence is None:
        recurrence = _is_right("recurrence", "tokens are single steps", recurrence_difference)
    return OwnKernels(decode, bool(prefill), recurrence)


def _switch(name: str) -> bool | None:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}={value}: set it to 1 or 0, or leave it out")
    return value == "1" if value else None


def _is_right(name: str, instead: str, difference: Callable[[], float]) -> bool:
    if not mx.metal.is_available():
        return False
    try:
        found = difference()
    except Exception as error:  # a compiler or driver may say anything
        logger.warning("%s kernel: does not run (%s), %s", name, error, instead)
        return False
    if not found < _TOLERANCE:
        logger.warning("%s kernel: off by %g, %s", name, found, instead)
        return False
    return True


def decode_difference(dtype: mx.Dtype) -> float:
    """Greatest one between the kernel and MLX, for values of a standard deviation of one."""
    length, page = PART + 70, 16
    q, pages, spec = _case(dtype, 1, length, page)
    blocks = np.arange(-(-length // page), dtype=np.int32)[None]
    rows = decode_rows(blocks, np.array([0]), np.array([length - 1]), page)
    return _difference(paged_decode(q, spec, None, pages, rows), q, pages, length)


def prefill_difference(dtype: mx.Dtype) -> float:
    """The same of the last tokens of a prompt."""
    length, queries, page = 90, 40, 16
    q, pages, spec = _case(dtype, queries, length, page)
    blocks = np.arange(-(-length // page), dtype=np.int32)[None]
    tiles = PrefillTiles.of(blocks, np.array([length - queries]), np.array([queries]), page)
    return _difference(paged_prefill(q, spec, None, pages, tiles), q, pages, length)


def recurrence_difference() -> float:
    """The same of what two rows of the delta rule give and leave."""
    random, heads, size, lengths = np.random.default_rng(0), 4, 128, [40, 3]

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32))

    count, scale = sum(lengths), size**-0.5
    tokens = TokenInputs(
        normal(count, heads, size) * scale,
        normal(count, heads, size) * scale,
        normal(count, heads, size),
        mx.sigmoid(normal(count, heads, 1, 1)),
        mx.sigmoid(normal(count, heads, 1)),
    )
    states, begins = normal(2, heads, size, size), np.array([0, lengths[0]])
    after = np.where(np.arange(count) == 7, 2, -1)
    rows = StateRows(lengths, begins, np.array([1, 0]), np.array([1, 0]), after)
    found = run(tokens, on_device(rows), states, delta=True)
    expected = side_by_side(tokens, rows, states[mx.array([1, 0])], delta=True)
    return max(float(mx.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def _case(
    dtype: mx.Dtype, queries: int, length: int, page: int
) -> tuple[mx.array, LayerPages, AttentionSpec]:
    heads, kv_heads, size = 8, 2, 128
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)

    slots = -(-length // page) * page
    k, v = normal(slots, kv_heads, size), normal(slots, kv_heads, size)
    pages = LayerPages(Pages("", k, None), Pages("", v, None))
    return normal(queries, heads, size), pages, AttentionSpec(0, heads, kv_heads, size, size**-0.5)


def _difference(found: mx.array, q: mx.array, pages: LayerPages, length: int) -> float:
    expected = mx.fast.scaled_dot_product_attention(
        q.swapaxes(0, 1)[None],
        *(side.data[None, :length].swapaxes(1, 2) for side in (pages.k, pages.v)),
        scale=q.shape[-1] ** -0.5,
        mask="causal",
    )[0].swapaxes(0, 1)
    return float(mx.abs(found.astype(mx.float32) - expected.astype(mx.float32)).max())
