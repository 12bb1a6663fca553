"""Attention of prompt chunks by our own Metal kernel, which reads the pages where they lie. Never
run on Metal so far, and off until somebody has measured it; see `kernel_choice`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from vllmx_core.ops.attention import AttentionSpec

from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.paged import compiled, page_arrays, page_template

SIMDS = 4
ROWS = 8 * SIMDS
"""Query vectors of a threadgroup: 8 of each simdgroup, as high as its matrices."""
MOST_HEAD_SIZE = 128
"""Longer vectors would not fit into a threadgroup's memory together with the scores."""
INPUTS = (
    "q",
    "k_pages",
    "v_pages",
    "k_scales",
    "v_scales",
    "block_table",
    "items",
    "sinks",
    "factors",
)
OUTPUTS = ("out",)


def prefill_fits(spec: AttentionSpec) -> bool:
    """True if the kernel has a form for the layer."""
    return spec.causal and spec.head_size % 8 == 0 and spec.head_size <= MOST_HEAD_SIZE


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """N pieces of rows, of any number of query tokens each, one behind the other."""

    block_table: mx.array  # (N, B)
    position: npt.NDArray[Any]  # (N,) of each one's first token
    queries: npt.NDArray[Any]  # (N,)
    page: int
    _items: dict[int, mx.array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        block_table: npt.NDArray[np.int32],
        position: npt.NDArray[Any],
        queries: npt.NDArray[Any],
        page: int,
    ) -> PrefillTiles:
        """Makes tiles of the host's arrays: (N, B), (N,), (N,)."""
        return cls(mx.array(np.ascontiguousarray(block_table)), position, queries, page)

    def items(self, group: int) -> mx.array:
        """(I, 5) what each threadgroup computes, for `group` query heads to a kv head: its tile,
        that one's first token, the token's position, the tile's number of query vectors (tokens
        times heads) and which of them is the first here; made for the first layer that asks."""
        if group not in self._items:
            vectors = self.queries * group  # (N,)
            counts = -(-vectors // ROWS)
            tile = np.repeat(np.arange(len(counts)), counts)
            index = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
            first_token = np.cumsum(self.queries) - self.queries
            columns = (tile, first_token[tile], self.position[tile], vectors[tile], index * ROWS)
            self._items[group] = mx.array(np.stack(columns, axis=1).astype(np.int32))
        return self._items[group]


@cache
def kernel() -> Callable[..., list[mx.array]]:
    return compiled("paged_prefill", INPUTS, OUTPUTS)


def paged_prefill(
    q: mx.array,
    spec: AttentionSpec,
    sinks: mx.array | None,
    pages: LayerPages,
    tiles: PrefillTiles,
) -> mx.array:
    """q (T, H, D), sinks (H,) -> (T, H, D) in q's dtype; the pages hold the tokens' own keys
    already."""
    items = tiles.items(q.shape[1] // spec.num_kv_heads)
    template = [
        *page_template(q, spec, pages),
        ("PAGE", tiles.page),
        ("SIMDS", SIMDS),
        ("REACH", spec.reach),
        ("SINKS", sinks is not None),
    ]
    (out,) = kernel()(
        inputs=[
            q,
            *page_arrays(pages),
            tiles.block_table,
            items,
            mx.zeros(1) if sinks is None else sinks,
            mx.array([spec.scale, spec.softcap or 1.0], mx.float32),
        ],
        template=template,
        grid=(len(items) * SIMDS * 32, spec.num_kv_heads, 1),
        threadgroup=(SIMDS * 32, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[mx.float32],
    )
    return out.astype(q.dtype)
