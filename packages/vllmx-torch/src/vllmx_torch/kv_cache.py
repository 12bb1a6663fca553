"""KV pages as tensors: (K, blocks * P, D) for keys and as many values in each place of the cache,
so that gathered context is ready for a batched product over the heads. Pages of codes come with a
scale for each vector; q4 has two numbers to a byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import BlockSizes, CachePlan, plan_cache
from vllmx_core.kv_dtypes import (
    KV_DTYPES,
    at_limit,
    packed_nibbles,
    sides,
    turned,
    unpacked_nibbles,
)
from vllmx_core.model import ModelShape, OwnedKV, page_rows
from vllmx_core.system.memory import GIB

from vllmx_torch.arrays import TORCH
from vllmx_torch.weights import DTYPES

CODES = {"int8": torch.int8, "fp8": torch.uint8, "q4": torch.uint8}
"""The types of stored codes; e4m3 as bytes, because few operations take torch's own type."""


def quantise(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """(..., D) float32 -> codes (..., D), or (..., D / 2) bytes of q4, and scales (...)."""
    if dtype == "q4":
        return packed_nibbles(x, TORCH)
    scaled, scale = at_limit(x, dtype, TORCH)
    codes = (
        scaled.round().to(torch.int8)
        if dtype == "int8"
        else scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    return codes, scale


def values(codes: Tensor, dtype: str) -> Tensor:
    """Codes as numbers: int8, e4m3 or, of q4, float32."""
    if dtype == "q4":
        found: Tensor = unpacked_nibbles(codes, TORCH)
        return found
    return codes if dtype == "int8" else codes.view(torch.float8_e4m3fn)


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The KV dtypes that a device has; e4m3 is missing on some."""
    try:
        torch.zeros(1, device=device).to(torch.float8_e4m3fn).float()
    except (RuntimeError, TypeError):
        return tuple(name for name in KV_DTYPES if name != "fp8")
    return KV_DTYPES


_STORED: Mapping[str, torch.dtype] = {**DTYPES, **CODES}
DEFAULT_HOST_BYTES = 4 * GIB
"""The largest cache in the host's memory, which others need too, without a flag and unless one
sequence needs more."""


@dataclass(frozen=True, slots=True)
class Pages:
    """All keys, or all values, of one place."""

    dtype: str
    data: Tensor  # (K, blocks * P, D), or D / 2 bytes of q4
    scales: Tensor | None  # (K, blocks * P) float32, of codes

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def turned(self, heads: Tensor) -> Tensor:
        """Heads (..., D) rotated as the vectors of these pages are, or back."""
        rotated: Tensor = turned(heads, TORCH) if self.dtype == "q4" else heads
        return rotated

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """vectors (T, K, D) float32 to slots (T,), rounded to the dtype."""
        vectors = vectors.transpose(0, 1)  # (K, T, D)
        if self.scales is None:
            self.data.index_copy_(1, slots, vectors.to(self.data.dtype))
            return
        codes, scales = quantise(vectors, self.dtype)
        self.data.index_copy_(1, slots, codes)
        self.scales.index_copy_(1, slots, scales)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer; one of latents has rows of one head in `k`, and no `v`."""

    k: Pages
    v: Pages
    group: int = 0
    """The number of the step's block table that lists them."""


def allocate(cache: CachePlan, device: torch.device) -> tuple[LayerPages, ...]:
    """Zeroed pages of each layer; layers of different groups have a place in common."""
    keys, values = sides(cache.dtype)
    places = [
        (
            _zeros(cache, kv, keys, kv.head_size, device),
            _zeros(cache, kv, values, kv.value_size, device),
        )
        for kv in cache.layout.places
    ]
    return tuple(LayerPages(*places[place], group) for group, place in cache.layout.layers)


def _zeros(cache: CachePlan, kv: OwnedKV, dtype: str, size: int, device: torch.device) -> Pages:
    shape = (kv.num_kv_heads, cache.num_blocks * page_rows(kv, cache.block_size))
    width = size // 2 if dtype == "q4" else size
    data = torch.zeros(*shape, width, dtype=_STORED[dtype], device=device)
    scales = torch.zeros(shape, device=device) if dtype in CODES else None
    return Pages(dtype, data, scales)


def allocate_states(
    shape: ModelShape, cache: CachePlan, device: torch.device
) -> tuple[Tensor, ...]:
    """(slots, heads, rows, cols) float32 of each recurrent layer."""
    slots = cache.states.num_slots
    return tuple(
        torch.zeros(slots, one.heads, one.rows, one.cols, device=device) for one in shape.states
    )


def plan_kv(
    shape: ModelShape,
    options: LoadOptions,
    dtype: str,
    device: torch.device,
    free: int,
    used: int,
) -> CachePlan:
    """See `vllmx_core.cache.capacity.plan_cache`."""
    most = DEFAULT_HOST_BYTES if device.type == "cpu" else None
    sizes = BlockSizes("torch")
    return plan_cache(shape, options, dtype, sizes, free, used, default_bytes=most)
