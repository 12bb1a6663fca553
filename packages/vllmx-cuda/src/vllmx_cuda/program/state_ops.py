"""Recurrent layers as launches, and where the states of their sequences lie."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.cache.state_capacity import StateSlots
from vllmx_core.model import StateSpec
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.short_conv import ShortConv

from vllmx_cuda.device.device import Device
from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.states import MAX_KEYS, keys_of
from vllmx_cuda.program.kv_cache import LayerStates
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes


def allocate_states(
    specs: Sequence[StateSpec], slots: StateSlots, device: Device
) -> tuple[LayerStates, ...]:
    """Slots as they come: none is read before it was written. The states of one slot lie one behind
    the other."""
    memory, found, begin = device.empty(slots.num_bytes), [], 0
    for spec in specs:
        found.append(LayerStates(memory.at(begin), slots.slot_bytes // 4))
        begin += spec.num_bytes
    return tuple(found)


def can_hold(op: Recurrence) -> bool:
    """Keys that the registers of eight threads hold; one decay for a head of Mamba."""
    one_decay = op.spec.rule == "delta" or op.spec.decay == "head"
    return op.spec.key_size <= MAX_KEYS and one_decay


def short_conv(op: ShortConv, to: Lowering) -> Enqueue:
    """A launch that reads the states, and one that writes them."""
    spec, states, width = op.spec, to.states[op.spec.state], op.x.width
    compute, keep = to.variant("short_conv"), to.variant("short_conv_keep")
    x, y, w, bias = to.place(op.x), to.place(op.out), to.vector(op.w), to.vector(op.bias)
    shape = width, spec.kernel
    activates = int(spec.activation is not None)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = step.states
        assert rows is not None, "a step of a model with states"
        arguments = (
            x,
            w,
            bias,
            rows.token_rows,
            rows.query_start,
            rows.state_from,
            states.memory,
            y,
            *shape,
            activates,
            states.slot_floats,
        )
        to.device.launch(compute, {"count": sizes.tokens, "width": width}, arguments)
        to.device.launch(
            keep,
            {"count": sizes.tokens, "width": width},
            (
                x,
                rows.token_rows,
                rows.query_start,
                rows.state_from,
                rows.state_to,
                rows.state_after,
                states.memory,
                *shape,
                states.slot_floats,
            ),
        )

    return enqueue


def recurrence(op: Recurrence, to: Lowering) -> Enqueue:
    spec, states = op.spec, to.states[op.spec.state]
    width = spec.width
    vec = vector_width(spec.key_size, width)
    plain, keeping = (
        to.variant("recurrence", VX_KEYS=keys_of(spec.key_size), VX_VEC=vec, VX_KEEPS=keeps)
        for keeps in (0, 1)
    )
    b = None if op.b is None else to.place(op.b)
    operands = (
        to.place(op.qkv),
        to.place(op.a),
        b,
        to.vector(op.a_log),
        to.vector(op.dt_bias),
        to.vector(op.d),
    )
    out = to.place(op.out)
    shape = (
        spec.num_heads,
        spec.num_key_heads,
        spec.key_size,
        spec.value_size,
        int(spec.decay == "channel"),
        int(spec.tiled),
        states.slot_floats,
        spec.scale,
        spec.beta,
        spec.norm_eps,
        spec.dt_min,
        spec.dt_max,
    )
    sizes_of_head = {"heads": spec.num_heads, "keys": spec.key_size, "values": spec.value_size}

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = step.states
        assert rows is not None, "a step of a model with states"
        placed = rows.query_start, rows.state_from, rows.state_to, rows.state_after
        arguments = (*operands, *placed, states.memory, out, *shape)
        kernel = plain if sizes.tokens == sizes.rows else keeping  # last tokens keep nothing more
        to.device.launch(kernel, {"rows": sizes.rows, **sizes_of_head}, arguments)

    return enqueue
