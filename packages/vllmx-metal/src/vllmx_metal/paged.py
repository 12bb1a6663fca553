"""Attention of decode rows by our own Metal kernel, which reads the pages where they lie. Never run
on Metal so far; `probe` compares it with MLX's own attention before it is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np
from vllmx_core.errors import ConfigError
from vllmx_core.model import AttentionSpec

from vllmx_metal.kv_cache import LayerPages, Pages

logger = logging.getLogger("vllmx.metal")

SWITCH = "VLLMX_METAL_PAGED_KERNEL"
"""1: use the kernel without a probe, 0: never; unset: where the probe finds it right."""
PART = 512
"""Positions of one threadgroup: a long context becomes many of them."""
SIMDS = 4
MOST_HEAD_VALUES = 1024
"""Query heads of a threadgroup times their size: bounds its shared memory at about 16 KiB."""
INPUTS = (
    "q", "k_pages", "v_pages", "k_scales", "v_scales", "block_table", "first_key", "key_end",
    "factors",
)  # fmt: skip
OUTPUTS = ("sums", "tops", "masses")


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """N rows of one query token each."""

    block_table: mx.array  # (N, B)
    first_key: mx.array  # (N,) the first position that each sees
    key_end: mx.array  # (N,) behind the last one
    longest: int
    """Greatest number of positions that one sees."""
    page: int


@cache
def kernel() -> Callable[..., list[mx.array]]:
    """Raises RuntimeError where MLX has no Metal."""
    folder = files("vllmx_metal") / "kernels"
    made: Callable[..., list[mx.array]] = mx.fast.metal_kernel(
        name="vllmx_paged_decode",
        input_names=list(INPUTS),
        output_names=list(OUTPUTS),
        source=(folder / "paged_decode.metal").read_text(),
        header=(folder / "paged_decode.h").read_text(),
    )  # type: ignore[assignment]
    return made


def paged_decode(q: mx.array, spec: AttentionSpec, pages: LayerPages, rows: DecodeRows) -> mx.array:
    """q (N, H, D) -> (N, H, D) in its dtype; the pages hold the rows' own keys already."""
    count, heads, size = q.shape
    group = heads // spec.num_kv_heads
    together = min(group, max(1, MOST_HEAD_VALUES // size))
    splits, parts = -(-group // together), -(-rows.longest // PART)
    nothing = mx.zeros(1)
    k_scales, v_scales = (
        nothing if side.scales is None else side.scales for side in (pages.k, pages.v)
    )
    template: list[tuple[str, Any]] = [
        ("T", q.dtype), ("S", pages.k.data.dtype), ("D", size), ("H", heads),
        ("K", spec.num_kv_heads), ("GROUP", group), ("HEADS", together), ("SPLITS", splits),
        ("PAGE", rows.page), ("PART", PART), ("SIMDS", SIMDS),
        ("SCALED", pages.k.scales is not None), ("CAPPED", spec.softcap is not None),
    ]  # fmt: skip
    sums, tops, masses = kernel()(
        inputs=[
            q, pages.k.data, pages.v.data, k_scales, v_scales, rows.block_table, rows.first_key,
            rows.key_end, mx.array([spec.scale, spec.softcap or 1.0], mx.float32),
        ],
        template=template,
        grid=(parts * SIMDS * 32, spec.num_kv_heads * splits, count),
        threadgroup=(SIMDS * 32, 1, 1),
        output_shapes=[(count, heads, parts, size), (count, heads, parts), (count, heads, parts)],
        output_dtypes=[mx.float32, mx.float32, mx.float32],
    )  # fmt: skip
    return _joined(sums, tops, masses, spec.sinks).astype(q.dtype)


def _joined(sums: mx.array, tops: mx.array, masses: mx.array, sinks: mx.array | None) -> mx.array:
    """One softmax of all parts; a sink is a part without values. (N, H, parts, D), (N, H, parts)
    twice, (H,) -> (N, H, D)."""
    highest = tops.max(-1, keepdims=True)  # (N, H, 1)
    if sinks is not None:
        highest = mx.maximum(highest, sinks[:, None])
    share = mx.exp(tops - highest)  # an empty part's top is -inf
    mass = (masses * share).sum(-1, keepdims=True)
    if sinks is not None:
        mass = mass + mx.exp(sinks[:, None] - highest)
    return (sums * share[..., None]).sum(-2) / mass


def wanted(dtype: mx.Dtype) -> bool:
    """Whether to use the kernel: as `SWITCH` says, else where there is Metal and a small case comes
    out as MLX's attention has it. Raises ConfigError for another value of the switch."""
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={switch}: set it to 1 or 0, or leave it out")
    if switch:
        return switch == "1"
    if not mx.metal.is_available():
        return False
    try:
        difference = _difference(dtype)
    except Exception as error:  # a compiler or driver may say anything
        logger.warning("paged decode kernel: does not run (%s), pages are gathered", error)
        return False
    if not difference < 0.02:  # bfloat16 rounds the result to 0.004
        logger.warning("paged decode kernel: off by %g, pages are gathered", difference)
        return False
    return True


def _difference(dtype: mx.Dtype) -> float:
    """Greatest one between both ways, for values of a standard deviation of one."""
    length, heads, kv_heads, size = PART + 70, 8, 2, 128
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)

    page = 16
    blocks = -(-length // page)
    q, k, v = normal(1, heads, size), *(normal(blocks * page, kv_heads, size) for _ in range(2))
    pages = LayerPages(Pages("", k, None), Pages("", v, None))
    spec = AttentionSpec(0, heads, kv_heads, size, size**-0.5)
    last, table = np.array([length - 1]), np.arange(blocks, dtype=np.int32)[None]
    found = paged_decode(q, spec, pages, decode_rows(table, np.array([0]), last, page))
    expected = mx.fast.scaled_dot_product_attention(
        q[:, :, None],
        *(side[None, :length].swapaxes(1, 2) for side in (k, v)),
        scale=spec.scale,
    )[:, :, 0]
    return float(mx.abs(found.astype(mx.float32) - expected.astype(mx.float32)).max())


def decode_rows(
    block_table: np.ndarray[Any, np.dtype[np.int32]],
    first_key: np.ndarray[Any, np.dtype[np.int64]],
    last_key: np.ndarray[Any, np.dtype[np.int64]],
    page: int,
) -> DecodeRows:
    """From the host's arrays: (N, B), (N,), (N,)."""
    return DecodeRows(
        mx.array(np.ascontiguousarray(block_table)),
        mx.array(first_key.astype(np.int32)),
        mx.array((last_key + 1).astype(np.int32)),
        int((last_key - first_key).max()) + 1,
        page,
    )
