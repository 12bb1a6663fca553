"""KV pages as MLX arrays: (blocks * P, K, D) for keys and as many values in each place of the
cache, and for codes a scale for each vector; q4 has two numbers to a byte.

MLX has values, not places: a write gives a new array. It takes the old one's memory, instead of
copying it, only where nothing else holds the old one. So the pages are rebound with every write,
nobody keeps a reference, and a step is submitted after the one before has let go of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import BlockSizes, CachePlan, plain_page_bytes, plan_cache
from vllmx_core.kv_dtypes import at_limit, packed_nibbles, sides, turned, unpacked_nibbles
from vllmx_core.model import ModelShape, OwnedKV, page_rows
from vllmx_core.system.memory import GIB

from vllmx_metal.arrays import DTYPES, METAL
from vllmx_metal.device import Device

CODES: Mapping[str, mx.Dtype] = {"int8": mx.int8, "fp8": mx.uint8, "q4": mx.uint8}
"""The types of stored codes; MLX has e4m3 as bytes."""


def quantise(x: mx.array, dtype: str) -> tuple[mx.array, mx.array]:
    """(..., D) float32 -> codes (..., D), or (..., D / 2) bytes of q4, and scales (...)."""
    if dtype == "q4":
        return packed_nibbles(x, METAL)
    scaled, scale = at_limit(x, dtype, METAL)
    codes = mx.round(scaled).astype(mx.int8) if dtype == "int8" else mx.to_fp8(scaled)
    return codes, scale


def dequantise(codes: mx.array, scales: mx.array, dtype: str) -> mx.array:
    """The values that `quantise` coded, float32; those of q4 are still rotated."""
    values: mx.array
    if dtype == "q4":
        values = unpacked_nibbles(codes, METAL)
    else:
        values = mx.from_fp8(codes, mx.float32) if dtype == "fp8" else codes.astype(mx.float32)
    return values * scales[..., None]


_STORED: Mapping[str, mx.Dtype] = {**DTYPES, **CODES}
BLOCK_SIZES = BlockSizes("metal")

DEFAULT_HOST_BYTES = 4 * GIB
"""The largest cache in the host's memory, which others need too, without a flag and unless one
sequence needs more."""

FEWEST_SEQS, MOST_SEQS = 8, 32
"""A machine with one GPU of this kind serves a desk, not a data centre: more rows than these take
memory from each other, and what the GPU gains by them is used up."""
TYPICAL_TOKENS = 4096
"""Few sequences ever grow to a long model's full length."""


@dataclass(slots=True)
class Pages:
    """All keys, or all values, of one place, as the last step that was built leaves them."""

    dtype: str
    data: mx.array  # (blocks * P, K, D), or D / 2 bytes of q4
    scales: mx.array | None  # (blocks * P, K) float32, of codes

    def turned(self, heads: mx.array) -> mx.array:
        """Heads (..., D) rotated as the vectors of these pages are, or back."""
        if self.dtype != "q4":
            return heads
        rotated: mx.array = turned(heads.astype(mx.float32), METAL).astype(heads.dtype)
        return rotated

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
        return dequantise(found, mx.take(self.scales, slots, axis=0), self.dtype)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer; one of latents has rows of one head in `k`, and no `v`."""

    k: Pages
    v: Pages
    group: int = 0
    """The number of the step's block table that lists them."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.k.arrays, *self.v.arrays)


def allocate(cache: CachePlan) -> tuple[LayerPages, ...]:
    """Zeroed pages of each layer; layers of different groups have a place in common."""
    keys, values = sides(cache.dtype)
    places = [
        (_zeros(cache, kv, keys, kv.head_size), _zeros(cache, kv, values, kv.value_size))
        for kv in cache.layout.places
    ]
    pages = tuple(LayerPages(*places[place], group) for group, place in cache.layout.layers)
    mx.eval([page.arrays for page in pages])
    return pages


def _zeros(cache: CachePlan, kv: OwnedKV, dtype: str, size: int) -> Pages:
    shape = (cache.num_blocks * page_rows(kv, cache.block_size), kv.num_kv_heads)
    data = mx.zeros((*shape, size // 2 if dtype == "q4" else size), _STORED[dtype])
    return Pages(dtype, data, mx.zeros(shape) if dtype in CODES else None)


def _default_num_seqs(
    shape: ModelShape, options: LoadOptions, dtype: str, device: Device, used: int
) -> int:
    """Sequences that run together where nobody asked for a number: as many as the memory without
    `used` holds at `TYPICAL_TOKENS` or at full length, whichever is shorter, within limits."""
    tokens = min(options.max_model_len, TYPICAL_TOKENS)
    if options.num_kv_blocks is not None:
        held = options.num_kv_blocks * options.block_size // tokens
    else:
        token_bytes = sum(sum(plain_page_bytes(kv, 1, dtype)) for kv in shape.kv_specs)
        budget = int(device.free_bytes * options.memory_fraction) - used
        if options.kv_cache_memory_bytes is not None:
            budget = options.kv_cache_memory_bytes
        slots = 2 * shape.state_slot_bytes  # one that runs and one that is kept
        held = budget // max(1, tokens * token_bytes + slots)
    return min(max(held, FEWEST_SEQS), MOST_SEQS)


def plan_kv(
    shape: ModelShape, options: LoadOptions, dtype: str, device: Device, used: int
) -> tuple[CachePlan, int]:
    """See `vllmx_core.cache.capacity.plan_cache`. Also the number of sequences that run together:
    without `max_num_seqs` 8 to 32, by what the memory holds."""
    BLOCK_SIZES.check(options.block_size)
    seqs = options.max_num_seqs or _default_num_seqs(shape, options, dtype, device, used)
    options = replace(options, max_num_seqs=seqs)
    most = None if device.is_gpu else DEFAULT_HOST_BYTES
    free = device.free_bytes
    cache = plan_cache(shape, options, dtype, BLOCK_SIZES, free, used, default_bytes=most)
    return cache, seqs
