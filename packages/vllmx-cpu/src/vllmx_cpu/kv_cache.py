"""How many KV blocks there are, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.kv_capacity import num_kv_blocks
from vllmx_core.memory import GIB
from vllmx_core.model import KVSpec

from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.native import library
from vllmx_cpu.structs import KV_DTYPES

BLOCK_MULTIPLE = 16
_ALIGNMENT = 4096
DEFAULT_BYTES = 4 * GIB
"""Without a flag the cache is no larger than this, unless one sequence needs more."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Bytes
    v: Bytes


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The cache that `options` and memory come to."""

    num_blocks: int
    block_size: int
    dtype: str
    layer_bytes: tuple[tuple[int, int], ...]
    """(k, v) bytes of one block in each layer."""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * sum(k + v for k, v in self.layer_bytes)

    def allocate(self) -> tuple[LayerPages, ...]:
        """All layers in one area: the system's huge pages would not fit into small ones, and
        every group of positions would be looked up on a page of its own."""
        sizes = [size * self.num_blocks for layer in self.layer_bytes for size in layer]
        starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        area = allocate(starts[-1])
        parts = [area[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return tuple(LayerPages(k, v) for k, v in zip(parts[::2], parts[1::2], strict=True))


def plan_kv(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, free: int, used: int
) -> KVPlan:
    """Blocks by num_kv_blocks, else by kv_cache_memory_bytes, else what memory_fraction of `free`
    leaves beside `used` (weights and activations), up to DEFAULT_BYTES or all sequences at full
    length. Raises CapacityError when a sequence of max_model_len does not fit (with shrink_to_fit:
    when not even one block does)."""
    size = options.block_size
    if size <= 0 or size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"block_size {size} cannot be used by the CPU backend: choose a multiple of"
            f" {BLOCK_MULTIPLE}",
            param="block_size",
        )
    layer_bytes = tuple(_block_bytes(kv, size, dtype) for kv in layers)
    block_bytes = max(1, sum(k + v for k, v in layer_bytes))
    blocks = num_kv_blocks(options, block_bytes, free, used, default_bytes=DEFAULT_BYTES)
    return KVPlan(blocks, size, dtype, layer_bytes)


def _block_bytes(kv: KVSpec, block_size: int, dtype: str) -> tuple[int, int]:
    arguments = (kv.num_kv_heads, kv.head_size, block_size, KV_DTYPES[dtype])
    return int(library().vx_k_page_bytes(*arguments)), int(library().vx_v_page_bytes(*arguments))
