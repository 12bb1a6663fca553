"""Random queries and KV pages, and what attention makes of them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.model import AttentionSpec
from vllmx_core.ops.attention import first_seen

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.kv_cache import LayerPages, Pages  # noqa: E402

Array = NDArray[Any]
PAGE = 16
WIDE = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


class Case:
    """Rows of `lengths` positions whose last `queries` (one each by default) are attended from;
    their blocks are in no order."""

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 64,
        kv: str = "f32",
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        dtype: str = "f32",
    ) -> None:
        random = np.random.default_rng(len(lengths) * size + heads)
        self.lengths = np.array(lengths)
        self.queries = np.ones_like(self.lengths) if queries is None else np.array(queries)
        blocks = -(-self.lengths // PAGE)
        order = random.permutation(sum(blocks) + 3).astype(np.int32)
        self.table = np.full((len(lengths), max(blocks)), 1 << 20, np.int32)  # nobody reads these
        for row, count in enumerate(blocks):
            self.table[row, :count] = order[sum(blocks[:row]) :][:count]
        q = random.standard_normal((sum(self.queries), heads, size)).astype(np.float32)
        k, v = (
            random.standard_normal((len(order) * PAGE, kv_heads, size)).astype(np.float32)
            for _ in range(2)
        )
        given = mx.array(q).astype(WIDE[dtype])
        kinds = kv_quant.sides(kv)
        self.pages = LayerPages(*map(_pages, (k, v), kinds))
        self._sinks = random.standard_normal(heads).astype(np.float32) if sinks else None
        self.sinks = mx.array(self._sinks) if sinks else None
        self.spec = AttentionSpec(
            0,
            heads,
            kv_heads,
            size,
            size**-0.5,
            window=window,
            chunked=chunked,
            softcap=softcap,
        )
        self.q = self.pages.k.turned(given)
        held = [kv_quant.rounded(side, kind) for side, kind in zip((k, v), kinds, strict=True)]
        rows = np.repeat(np.arange(len(lengths)), self.queries)
        query = np.array(given.astype(mx.float32))
        self.expected = np.stack(
            [
                self._attend(query[token], *held, rows[token], last)
                for token, last in enumerate(self._positions())
            ]
        )  # (T, H, D)

    def _positions(self) -> list[int]:
        return [
            length - count + token
            for length, count in zip(self.lengths, self.queries, strict=True)
            for token in range(count)
        ]

    def first_key(self, last: Any) -> Any:
        """The first key that queries at these positions see."""
        return np.maximum(0, first_seen(last, self.spec.reach))

    def _attend(self, q: Array, k: Array, v: Array, row: int, last: int) -> Array:
        positions = np.arange(self.first_key(last), last + 1)
        slots = self.table[row][positions // PAGE] * PAGE + positions % PAGE
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (side[slots].astype(np.float64).repeat(group, axis=1) for side in (k, v))
        scores = np.einsum("hd,chd->hc", q.astype(np.float64), keys) * self.spec.scale
        if self.spec.softcap is not None:
            scores = self.spec.softcap * np.tanh(scores / self.spec.softcap)
        weights = np.exp(scores)
        mass = weights.sum(1)
        if self._sinks is not None:
            mass = mass + np.exp(self._sinks.astype(np.float64))
        return np.einsum("hc,chd->hd", weights / mass[:, None], values)

    def error(self, found: Any) -> float:
        """The greatest one; NaN where anything is."""
        found = self.pages.v.turned(found)
        return float(np.abs(np.array(found.astype(mx.float32)) - self.expected).max())


def _pages(side: Array, kv: str) -> Pages:
    if kv in WIDE:
        return Pages(kv, mx.array(side).astype(WIDE[kv]), None)
    if kv == "q4":
        codes, scales = kv_quant.packed_nibbles(side)
    else:
        codes, scales = kv_quant.quantise(side, kv)
    return Pages(kv, mx.array(codes), mx.array(scales))
