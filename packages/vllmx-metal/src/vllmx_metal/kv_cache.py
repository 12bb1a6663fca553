"""KV pages as MLX arrays: (blocks * P, K, D) for keys and as many values in each attention layer.

MLX has values, not places: a write gives a new array. It takes the old one's memory, instead of
copying it, only where nothing else holds the old one. So the pages are rebound with every write,
nobody keeps a reference, and a step is submitted after the one before has let go of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.memory import GIB
from vllmx_core.model import KVSpec

from vllmx_metal.device import Device
from vllmx_metal.dtypes import DTYPES

DEFAULT_HOST_BYTES = 4 * GIB
"""In the host's memory, which others need too, the cache is no larger than this without a flag,
unless one sequence needs more."""


@dataclass(slots=True)
class LayerPages:
    """KV pages of one attention layer, as the last step that was built leaves them."""

    k: mx.array  # (blocks * P, K, D)
    v: mx.array  # (blocks * P, K, D)

    def write(self, slots: mx.array, k: mx.array, v: mx.array) -> None:
        """k and v (T, K, D) go to slots (T,)."""
        self.k[slots] = k.astype(self.k.dtype)
        self.v[slots] = v.astype(self.v.dtype)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The cache that options and memory come to."""

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVSpec, ...]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * block_bytes(self.layers, self.block_size, self.dtype)

    def allocate(self) -> tuple[LayerPages, ...]:
        """Zeroed pages."""
        slots, dtype = self.num_blocks * self.block_size, DTYPES[self.dtype]
        pages = tuple(
            LayerPages(*(mx.zeros((slots, kv.num_kv_heads, kv.head_size), dtype) for _ in range(2)))
            for kv in self.layers
        )
        mx.eval(*(array for page in pages for array in (page.k, page.v)))
        return pages


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers."""
    values = sum(2 * kv.num_kv_heads * kv.head_size for kv in layers)
    return values * block_size * DTYPES[dtype].size


def plan_kv(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, device: Device, used: int
) -> KVPlan:
    """See `vllmx_core.kv_capacity.num_kv_blocks`; raises ConfigError for a block without tokens."""
    if options.block_size < 1:
        raise ConfigError(
            f"block_size must be at least 1, got {options.block_size}", param="block_size"
        )
    size = max(1, block_bytes(layers, options.block_size, dtype))
    most = None if device.is_gpu else DEFAULT_HOST_BYTES
    blocks = num_kv_blocks(options, size, device.free_bytes, used, default_bytes=most)
    return KVPlan(blocks, options.block_size, dtype, tuple(layers))
