"""Attention of decode rows by our own Metal kernel, which reads the pages where they lie. Never run
on Metal so far; `kernel_choice` compares it with MLX's own attention before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np
from vllmx_core.ops.attention import AttentionSpec

from vllmx_metal.kv_cache import LayerPages

PART = 512
"""Positions of one threadgroup: a long context becomes many of them."""
SIMDS = 4
MOST_HEAD_VALUES = 1024
"""Query heads of a threadgroup times their size: bounds its shared memory at about 16 KiB."""
INPUTS = (
    "q",
    "k_pages",
    "v_pages",
    "k_scales",
    "v_scales",
    "block_table",
    "first_key",
    "key_end",
    "factors",
)
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


def compiled(
    stem: str, inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., list[mx.array]]:
    """The kernel of that file. Raises RuntimeError where MLX has no Metal."""
    folder = files("vllmx_metal") / "kernels"
    made: Callable[..., list[mx.array]] = mx.fast.metal_kernel(
        name=f"vllmx_{stem}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=(folder / f"{stem}.metal").read_text(),
        header=(folder / "page_value.h").read_text(),
    )  # type: ignore[assignment]
    return made


@cache
def kernel() -> Callable[..., list[mx.array]]:
    return compiled("paged_decode", INPUTS, OUTPUTS)


def page_template(q: mx.array, spec: AttentionSpec, pages: LayerPages) -> list[tuple[str, Any]]:
    """Template arguments of kernels that read pages, for q (N, H, D)."""
    heads, size = q.shape[1:]
    return [
        ("T", q.dtype),
        ("D", size),
        ("H", heads),
        ("K", spec.num_kv_heads),
        ("GROUP", heads // spec.num_kv_heads),
        ("SCALED", pages.k.scales is not None),
        ("K_NIBBLES", pages.k.dtype == "q4"),
        ("V_NIBBLES", pages.v.dtype == "q4"),
        ("CAPPED", spec.softcap is not None),
    ]


def page_arrays(pages: LayerPages) -> list[mx.array]:
    """Keys, values and their scales, which kernels without codes do not read."""
    sides = (pages.k, pages.v)
    scales = [mx.zeros(1) if side.scales is None else side.scales for side in sides]
    return [pages.k.data, pages.v.data, *scales]


def paged_decode(
    q: mx.array,
    spec: AttentionSpec,
    sinks: mx.array | None,
    pages: LayerPages,
    rows: DecodeRows,
) -> mx.array:
    """q (N, H, D), sinks (H,) -> (N, H, D) in q's dtype; the pages hold the rows' own keys
    already."""
    count, heads, size = q.shape
    group = heads // spec.num_kv_heads
    together = min(group, max(1, MOST_HEAD_VALUES // size))
    splits, parts = -(-group // together), -(-rows.longest // PART)
    template = [
        *page_template(q, spec, pages),
        ("HEADS", together),
        ("SPLITS", splits),
        ("PAGE", rows.page),
        ("PART", PART),
        ("SIMDS", SIMDS),
    ]
    sums, tops, masses = kernel()(
        inputs=[
            q,
            *page_arrays(pages),
            rows.block_table,
            rows.first_key,
            rows.key_end,
            mx.array([spec.scale, spec.softcap or 1.0], mx.float32),
        ],
        template=template,
        grid=(parts * SIMDS * 32, spec.num_kv_heads * splits, count),
        threadgroup=(SIMDS * 32, 1, 1),
        output_shapes=[(count, heads, parts, size), (count, heads, parts), (count, heads, parts)],
        output_dtypes=[mx.float32, mx.float32, mx.float32],
    )
    return _joined(sums, tops, masses, sinks).astype(q.dtype)


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


def decode_rows(
    block_table: np.ndarray[Any, np.dtype[np.int32]],
    first_key: np.ndarray[Any, np.dtype[np.int64]],
    last_key: np.ndarray[Any, np.dtype[np.int64]],
    page: int,
) -> DecodeRows:
    """Makes rows of the host's arrays: (N, B), (N,), (N,)."""
    return DecodeRows(
        mx.array(np.ascontiguousarray(block_table)),
        mx.array(first_key.astype(np.int32)),
        mx.array((last_key + 1).astype(np.int32)),
        int((last_key - first_key).max()) + 1,
        page,
    )
