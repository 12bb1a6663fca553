"""The memory that the states of recurrent layers lie in."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_size_t, c_void_p

from vllmx_core.cache.state_capacity import StateSlots
from vllmx_core.model import StateSpec

from vllmx_cpu.memory import Bytes, allocate


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
