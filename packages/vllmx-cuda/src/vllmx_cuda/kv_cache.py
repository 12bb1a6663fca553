"""KV pages on the device: how many blocks there are, and where each layer's lie.

A layer has one buffer of keys and one of values, (blocks, K, P, D) each: the tokens of a page that
one head reads are neighbours. Codes of 8 bits have a float32 scale for each token and head beside
them, (blocks, K, P); `vllmx_core.kv_quant` is their rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.model import KVSpec

from vllmx_cuda.device import Device, Memory
from vllmx_cuda.dtypes import ITEM_BYTES
from vllmx_cuda.kernel_specs.attention import KV_E4M3, KV_ELEM, KV_INT8

CODES: Mapping[str, int] = {"int8": KV_INT8, "fp8": KV_E4M3}
"""8-bit dtypes by the value of VX_KV."""
_ITEM_BYTES = ITEM_BYTES | dict.fromkeys(CODES, 1)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Memory
    v: Memory
    k_scales: Memory | None = None
    v_scales: Memory | None = None


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The cache that options and memory come to."""

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVSpec, ...]

    @property
    def kind(self) -> int:
        """Value of VX_KV."""
        return CODES.get(self.dtype, KV_ELEM)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * block_bytes(self.layers, self.block_size, self.dtype)

    def allocate(self, device: Device) -> tuple[LayerPages, ...]:
        """As they come: attention reads nothing that was not written before."""
        tokens, pages = self.num_blocks * self.block_size, []
        for kv in self.layers:
            size = tokens * kv.num_kv_heads * kv.head_size * _ITEM_BYTES[self.dtype]
            sizes = [size, size]
            if self.dtype in CODES:
                sizes += [tokens * kv.num_kv_heads * 4] * 2
            pages.append(LayerPages(*map(device.empty, sizes)))
        return tuple(pages)


def block_bytes(layers: Sequence[KVSpec], block_size: int, dtype: str) -> int:
    """Of one block in all layers, with its scales."""
    scale = 4 if dtype in CODES else 0
    heads = ((kv.num_kv_heads, kv.head_size * _ITEM_BYTES[dtype] + scale) for kv in layers)
    return block_size * sum(2 * count * size for count, size in heads)


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
