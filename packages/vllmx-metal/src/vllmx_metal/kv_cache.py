"""KV pages as MLX arrays: (blocks * P, K, D) for keys and as many values in each attention layer,
and for 8-bit codes a scale for each vector beside them.

MLX has values, not places: a write gives a new array. It takes the old one's memory, instead of
copying it, only where nothing else holds the old one. So the pages are rebound with every write,
nobody keeps a reference, and a step is submitted after the one before has let go of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.memory import GIB
from vllmx_core.model import KVSpec

from vllmx_metal.device import Device
from vllmx_metal.dtypes import DTYPES
from vllmx_metal.kv_quant import CODES, dequantise, quantise

_STORED: Mapping[str, mx.Dtype] = {**DTYPES, **CODES}

DEFAULT_HOST_BYTES = 4 * GIB
"""In the host's memory, which others need too, the cache is no larger than this without a flag,
unless one sequence needs more."""

FEWEST_SEQS, MOST_SEQS = 8, 32
"""A machine with one GPU of this kind serves a desk, not a data centre: more rows than these take
memory from each other, and what the GPU gains by them is used up."""
TYPICAL_TOKENS = 4096
"""Few sequences ever grow to a long model's full length."""


@dataclass(slots=True)
class Pages:
    """All keys, or all values, of one attention layer, as the last step that was built leaves
    them."""

    dtype: str
    data: mx.array  # (blocks * P, K, D)
    scales: mx.array | None  # (blocks * P, K) float32 beside 8-bit codes

    def write(self, slots: mx.array, vectors: mx.array) -> None:
        """vectors (T, K, D) go to slots (T,), rounded to the dtype."""
        if self.scales is None:
            self.data[slots] = vectors.astype(self.data.dtype)
            return
        codes, scales = quantise(vectors.astype(mx.float32), self.dtype)
        self.data[slots] = codes
        self.scales[slots] = scales

    def gather(self, slots: mx.array) -> mx.array:
        """(N,) -> (N, K, D)."""
        found = mx.take(self.data, slots, axis=0)
        if self.scales is None:
            return found
        return dequantise(found, mx.take(self.scales, slots, axis=0))

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Pages
    v: Pages

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.k.arrays, *self.v.arrays)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The cache that options and memory come to."""

    num_seqs: int
    """Sequences that run together."""
    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVSpec, ...]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * block_bytes(self.layers, self.block_size, self.dtype)

    def allocate(self) -> tuple[LayerPages, ...]:
        """Zeroed pages."""
        pages = tuple(LayerPages(self._zeros(kv), self._zeros(kv)) for kv in self.layers)
        mx.eval([page.arrays for page in pages])
        return pages

    def _zeros(self, kv: KVSpec) -> Pages:
        shape = (self.num_blocks * self.block_size, kv.num_kv_heads)
        data = mx.zeros((*shape, kv.head_size), _STORED[self.dtype])
        return Pages(self.dtype, data, mx.zeros(shape) if self.dtype in CODES else None)


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers."""
    item_bytes, scale_bytes = _STORED[dtype].size, 4 if dtype in CODES else 0
    return block_size * sum(
        2 * kv.num_kv_heads * (kv.head_size * item_bytes + scale_bytes) for kv in layers
    )


def _default_num_seqs(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, device: Device, used: int
) -> int:
    """Sequences that run together where nobody asked for a number: as many as the memory beside
    `used` holds at `TYPICAL_TOKENS` or at full length, whichever is shorter, within limits."""
    tokens = min(options.max_model_len, TYPICAL_TOKENS)
    if options.num_kv_blocks is not None:
        held = options.num_kv_blocks * options.block_size // tokens
    else:
        size = max(1, tokens * block_bytes(layers, 1, dtype))
        budget = int(device.free_bytes * options.memory_fraction) - used
        if options.kv_cache_memory_bytes is not None:
            budget = options.kv_cache_memory_bytes
        held = budget // size
    return min(max(held, FEWEST_SEQS), MOST_SEQS)


def plan_kv(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, device: Device, used: int
) -> KVPlan:
    """See `vllmx_core.kv_capacity.num_kv_blocks`; without `max_num_seqs` for 8 to 32 sequences, by
    what the memory holds. Raises ConfigError for a block without tokens."""
    if options.block_size < 1:
        raise ConfigError(
            f"block_size must be at least 1, got {options.block_size}", param="block_size"
        )
    seqs = options.max_num_seqs or _default_num_seqs(layers, options, dtype, device, used)
    options = replace(options, max_num_seqs=seqs)
    size = max(1, block_bytes(layers, options.block_size, dtype))
    most = None if device.is_gpu else DEFAULT_HOST_BYTES
    blocks = num_kv_blocks(options, size, device.free_bytes, used, default_bytes=most)
    return KVPlan(seqs, blocks, options.block_size, dtype, tuple(layers))
