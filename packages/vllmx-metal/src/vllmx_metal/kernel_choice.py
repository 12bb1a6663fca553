"""Which attention kernels of our own are used: as the environment says, or where a small case comes
out as MLX's own attention has it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from vllmx_core.errors import ConfigError
from vllmx_core.ops.attention import AttentionSpec

from vllmx_metal.kv_cache import LayerPages, Pages
from vllmx_metal.paged import PART, decode_rows, paged_decode
from vllmx_metal.paged_prefill import PrefillTiles, paged_prefill

logger = logging.getLogger("vllmx.metal")

DECODE_SWITCH = "VLLMX_METAL_PAGED_KERNEL"
"""1: use the kernel without a probe, 0: never; unset: where the probe finds it right."""
PREFILL_SWITCH = "VLLMX_METAL_PAGED_PREFILL"
"""1: use the kernel, 0 or unset: never, for nobody has measured yet which way is faster."""
_TOLERANCE = 0.02
"""bfloat16 rounds the result to 0.004."""


@dataclass(frozen=True, slots=True)
class PagedKernels:
    """Which of our kernels attend; MLX's own attention does the rest over gathered pages."""

    decode: bool = False
    prefill: bool = False


def choose_kernels(dtype: mx.Dtype) -> PagedKernels:
    """Raises ConfigError for a switch that is neither 0 nor 1."""
    decode, prefill = _switch(DECODE_SWITCH), _switch(PREFILL_SWITCH)
    if decode is None:
        decode = mx.metal.is_available() and _is_right(lambda: decode_difference(dtype))
    return PagedKernels(decode, bool(prefill))


def _switch(name: str) -> bool | None:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}={value}: set it to 1 or 0, or leave it out")
    return value == "1" if value else None


def _is_right(difference: Callable[[], float]) -> bool:
    try:
        found = difference()
    except Exception as error:  # a compiler or driver may say anything
        logger.warning("paged decode kernel: does not run (%s), pages are gathered", error)
        return False
    if not found < _TOLERANCE:
        logger.warning("paged decode kernel: off by %g, pages are gathered", found)
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
