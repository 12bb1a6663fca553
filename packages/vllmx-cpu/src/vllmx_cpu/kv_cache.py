"""Memory of the KV cache and of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_size_t, c_void_p
from itertools import accumulate

from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import BlockSizes, CachePlan, plain_page_bytes, plan_cache
from vllmx_core.cache.state_capacity import StateSlots
from vllmx_core.model import LatentKV, ModelShape, OwnedKV, StateSpec
from vllmx_core.records import Record
from vllmx_core.system.memory import GIB

from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.native import library
from vllmx_cpu.structs import KV_DTYPES

BLOCK_SIZES = BlockSizes("CPU", multiple=16)
_ALIGNMENT = 4096
DEFAULT_BYTES = 4 * GIB
"""The largest cache without a flag, unless one sequence needs more."""


class LayerPages(Record):
    """KV pages of one attention layer."""

    k: Bytes
    v: Bytes
    group: int
    """The number of the step's block table that lists them."""


def allocate_pages(cache: CachePlan) -> tuple[LayerPages, ...]:
    """Pages of each layer; layers of different groups have a place in common. All in one area: the
    system's huge pages would not fit into small ones, and every group of positions would be looked
    up on a page of its own."""
    sizes = [size * cache.num_blocks for place in cache.page_bytes for size in place]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    area = allocate(starts[-1])
    parts = [area[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    places = list(zip(parts[::2], parts[1::2], strict=True))
    return tuple(LayerPages(*places[place], group) for group, place in cache.layout.layers)


def plan_kv(shape: ModelShape, options: LoadOptions, dtype: str, free: int, used: int) -> CachePlan:
    """See `vllmx_core.cache.capacity.plan_cache`; without a flag no more than DEFAULT_BYTES."""
    return plan_cache(
        shape,
        options,
        dtype,
        BLOCK_SIZES,
        free,
        used,
        default_bytes=DEFAULT_BYTES,
        page_bytes=_page_bytes,
    )


def _page_bytes(kv: OwnedKV, block_size: int, dtype: str) -> tuple[int, int]:
    if isinstance(kv, LatentKV):  # one row after the other
        return plain_page_bytes(kv, block_size, dtype)
    arguments = (kv.num_kv_heads, kv.head_size, block_size, KV_DTYPES[dtype])
    return int(library().vx_k_page_bytes(*arguments)), int(library().vx_v_page_bytes(*arguments))


class VxStates(Structure):
    """The states of one layer; native/state.h."""

    _fields_ = [("base", c_void_p), ("slot_bytes", c_size_t)]
    memory: Bytes
    """The memory of all of them."""


def allocate_states(specs: Sequence[StateSpec], slots: StateSlots) -> tuple[VxStates, ...]:
    """Slots for the states of each layer; those of one slot lie one behind the other."""
    memory = allocate(slots.num_bytes)
    found, start = [], int(memory.ctypes.data)
    for spec in specs:
        states = VxStates(start, slots.slot_bytes)
        states.memory = memory
        found.append(states)
        start += spec.num_bytes
    return tuple(found)
