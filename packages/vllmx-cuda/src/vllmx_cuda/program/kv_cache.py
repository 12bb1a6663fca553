"""KV pages on the device: the number of blocks, and the memory of each layer.

A place has one buffer of keys and one of values, (blocks, K, P, D) each: the tokens of a page that
one head reads are neighbours. Codes of 8 bits come with a float32 scale for each token and head,
(blocks, K, P); `vllmx_core.kv_dtypes` is their rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import BlockSizes, CachePlan, plan_cache
from vllmx_core.model import ModelShape, OwnedKV

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.kernel_specs.attention import KV_E4M3, KV_ELEM, KV_INT8

CODES: Mapping[str, int] = {"int8": KV_INT8, "fp8": KV_E4M3}
"""8-bit dtypes by the value of VX_KV."""
BLOCK_SIZES = BlockSizes("CUDA", power_of_two=True)
_ITEM_BYTES = ITEM_BYTES | dict.fromkeys(CODES, 1)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Memory
    v: Memory
    k_scales: Memory | None = None
    v_scales: Memory | None = None
    group: int = 0
    """The number of the step's block table that lists them."""


def kind_of(dtype: str) -> int:
    """Value of VX_KV."""
    return CODES.get(dtype, KV_ELEM)


def allocate(cache: CachePlan, device: Device) -> tuple[LayerPages, ...]:
    """Pages of each layer, as they come: attention reads nothing that was not written before.
    Layers of different groups have a place in common."""
    places = [_allocate_place(cache, kv, device) for kv in cache.layout.places]
    return tuple(replace(places[place], group=group) for group, place in cache.layout.layers)


def _allocate_place(cache: CachePlan, kv: OwnedKV, device: Device) -> LayerPages:
    vectors = cache.num_blocks * cache.block_size * kv.num_kv_heads
    item = _ITEM_BYTES[cache.dtype]
    k, v = (device.empty(vectors * size * item) for size in (kv.head_size, kv.value_size))
    if cache.dtype not in CODES:
        return LayerPages(k, v)
    return LayerPages(k, v, device.empty(4 * vectors), device.empty(4 * vectors))


def plan_kv(shape: ModelShape, options: LoadOptions, dtype: str, free: int, used: int) -> CachePlan:
    """Sizes the cache as `plan_cache` does. Kernels find a position's page by shifting, so a page
    must hold a power of two of tokens."""
    return plan_cache(shape, options, dtype, BLOCK_SIZES, free, used)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    memory: Memory
    """The memory from that of slot 0 on."""
    slot_floats: int
    """The numbers from one slot to the next."""
