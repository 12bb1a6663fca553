"""KV pages as tensors: (K, blocks * P, D) for keys and as many values in each attention layer, so
that gathered context is ready for a batched product over the heads. 8-bit pages have a scale for
each vector beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.memory import GIB
from vllmx_core.model import KVSpec

from vllmx_torch.kv_quant import CODES, quantise
from vllmx_torch.weights import DTYPES

_STORED: Mapping[str, torch.dtype] = {**DTYPES, **CODES}
DEFAULT_HOST_BYTES = 4 * GIB
"""In the host's memory, which others need too, the cache is no larger than this without a flag,
unless one sequence needs more."""


@dataclass(frozen=True, slots=True)
class Pages:
    """All keys, or all values, of one attention layer."""

    dtype: str
    data: Tensor  # (K, blocks * P, D)
    scales: Tensor | None  # (K, blocks * P) float32 beside 8-bit codes

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

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
    """KV pages of one attention layer."""

    k: Pages
    v: Pages


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

    def allocate(self, device: torch.device) -> tuple[LayerPages, ...]:
        """Zeroed pages."""
        return tuple(
            LayerPages(self._zeros(kv, device), self._zeros(kv, device)) for kv in self.layers
        )

    def _zeros(self, kv: KVSpec, device: torch.device) -> Pages:
        shape = (kv.num_kv_heads, self.num_blocks * self.block_size)
        data = torch.zeros(*shape, kv.head_size, dtype=_STORED[self.dtype], device=device)
        scales = torch.zeros(shape, device=device) if self.dtype in CODES else None
        return Pages(self.dtype, data, scales)


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers."""
    item_bytes = int(_STORED[dtype].itemsize)
    scale_bytes = 4 if dtype in CODES else 0
    return block_size * sum(
        2 * kv.num_kv_heads * (kv.head_size * item_bytes + scale_bytes) for kv in layers
    )


def plan_kv(
    layers: Sequence[KVSpec],
    options: LoadOptions,
    dtype: str,
    device: torch.device,
    free: int,
    used: int,
) -> KVPlan:
    """See `vllmx_core.kv_capacity.num_kv_blocks`; raises ConfigError for a block without tokens."""
    if options.block_size < 1:
        raise ConfigError(
            f"block_size must be at least 1, got {options.block_size}", param="block_size"
        )
    size = max(1, block_bytes(layers, options.block_size, dtype))
    most = DEFAULT_HOST_BYTES if device.type == "cpu" else None
    blocks = num_kv_blocks(options, size, free, used, default_bytes=most)
    return KVPlan(blocks, options.block_size, dtype, tuple(layers))
