"""KV pages as tensors: (K, blocks * P, D) for keys and as many values in each attention layer, so
that gathered context is ready for a batched product over the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.memory import GIB
from vllmx_core.model import KVSpec

from vllmx_torch.weights import DTYPES

DEFAULT_HOST_BYTES = 4 * GIB
"""In the host's memory, which others need too, the cache is no larger than this without a flag,
unless one sequence needs more."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Tensor  # (K, blocks * P, D)
    v: Tensor  # (K, blocks * P, D)


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
        slots, dtype = self.num_blocks * self.block_size, DTYPES[self.dtype]
        return tuple(
            LayerPages(
                *(
                    torch.zeros(kv.num_kv_heads, slots, kv.head_size, dtype=dtype, device=device)
                    for _ in range(2)
                )
            )
            for kv in self.layers
        )


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers."""
    values = sum(2 * kv.num_kv_heads * kv.head_size for kv in layers)
    return values * block_size * DTYPES[dtype].itemsize


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
