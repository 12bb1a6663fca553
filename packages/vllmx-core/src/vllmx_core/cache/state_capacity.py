"""Number of slots for the states of recurrent layers, and of sequences that can run together.

Slots and KV blocks share the cache memory. A running sequence needs one slot. Two spare slots allow
a snapshot while its sequence continues in another slot; more slots keep states for later requests.
"""

from __future__ import annotations

from vllmx_core.backend import DEFAULT_NUM_SEQS, LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.records import Record
from vllmx_core.system.memory import format_bytes

SPARE_SLOTS = 2
"""Slots in addition to one for each sequence."""


class StateSlots(Record):
    """The slots of a load."""

    num_slots: int
    slot_bytes: int
    num_seqs: int
    """Sequences that may run together: `LoadOptions.num_seqs`, or fewer if the user set no number
    and their states would take more than half of the memory."""

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def plan_slots(slot_bytes: int, options: LoadOptions, budget: int, others: int) -> StateSlots:
    """Plans as many slots as were asked for, else twice as many as sequences run together, in no
    more than half of the budget unless the sequences themselves need more.

    Args:
        slot_bytes: all states of one sequence; 0 for a model without.
        budget: memory of KV blocks and slots together.
        others: bytes of it that blocks need at the least.

    Raises CapacityError where there is no room for a slot for each sequence and two more.
    """
    if not slot_bytes:
        return StateSlots(0, 0, options.num_seqs)
    room = max(0, budget - others) // slot_bytes
    half = max(0, budget // 2) // slot_bytes
    if options.num_state_slots is not None:
        slots = options.num_state_slots
        seqs = options.max_num_seqs or min(DEFAULT_NUM_SEQS, max(1, slots - SPARE_SLOTS))
        if slots > room:
            raise _no_memory("num_state_slots", slots, slot_bytes, room)
        if slots < seqs + SPARE_SLOTS:
            raise _too_few(slots, seqs)
        return StateSlots(slots, slot_bytes, seqs)
    seqs = options.max_num_seqs or max(1, min(DEFAULT_NUM_SEQS, (half - SPARE_SLOTS) // 2))
    least = seqs + SPARE_SLOTS
    if least > room:
        raise _no_memory("max_num_seqs", least, slot_bytes, room)
    return StateSlots(max(least, min(half, 2 * seqs + SPARE_SLOTS)), slot_bytes, seqs)


def _too_few(slots: int, seqs: int) -> CapacityError:
    return CapacityError(
        f"num_state_slots is {slots}: {seqs} sequences that run together need {seqs + SPARE_SLOTS}"
        f" slots for the states of recurrent layers: raise --num-state-slots to"
        f" {seqs + SPARE_SLOTS}"
        + (f" or lower --max-num-seqs to {slots - SPARE_SLOTS}" if slots > SPARE_SLOTS else ""),
        param="num_state_slots",
    )


def _no_memory(param: str, slots: int, slot_bytes: int, room: int) -> CapacityError:
    fits = room if param == "num_state_slots" else room - SPARE_SLOTS
    flag = "--" + param.replace("_", "-")
    lower = f"lower {flag} to {fits} or " if fits > 0 else ""
    return CapacityError(
        f"{param} asks for {slots} slots of {format_bytes(slot_bytes)} for the states of recurrent"
        f" layers, there is room for {room} next to weights and KV cache: {lower}raise"
        " --memory-fraction or free memory",
        param=param,
    )
