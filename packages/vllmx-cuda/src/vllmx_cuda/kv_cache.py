"""KV pages on the device: how many blocks there are, and where each layer's lie.

A layer has one buffer of keys and one of values, (blocks, K, P, D) each: the tokens of a page that
one head reads are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.model import KVSpec

from vllmx_cuda.device import Device, Memory
from vllmx_cuda.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Memory
    v: Memory


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

    def allocate(self, device: Device) -> tuple[LayerPages, ...]:
        """As they come: attention reads nothing that was not written before."""
        item = self.num_blocks * self.block_size * ITEM_BYTES[self.dtype]
        sizes = [kv.num_kv_heads * kv.head_size * item for kv in self.layers]
        return tuple(LayerPages(device.empty(size), device.empty(size)) for size in sizes)


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers."""
    values = sum(2 * kv.num_kv_heads * kv.head_size for kv in layers)
    return values * block_size * ITEM_BYTES[dtype]


def plan_kv(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, free: int, used: int
) -> KVPlan:
    """See `vllmx_core.kv_capacity.num_kv_blocks`. Raises ConfigError for a block size that is no
    power of two: the kernels find a position's page by shifting."""
    size = options.block_size
    if size < 1 or size & (size - 1):
        raise ConfigError(
            f"block_size {size} cannot be used by the CUDA backend: choose a power of two",
            param="block_size",
        )
    one = max(1, block_bytes(layers, size, dtype))
    return KVPlan(num_kv_blocks(options, one, free, used), size, dtype, tuple(layers))
