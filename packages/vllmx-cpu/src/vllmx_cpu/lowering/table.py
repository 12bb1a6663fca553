"""Lowers each op to what the native team runs: a function and a struct of arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllmx_core.ops.op import Op
from vllmx_core.ops.values import Value

from vllmx_cpu.lowering import attention, compressed, experts, images, products, ranks, rows, states
from vllmx_cpu.lowering.site import Address, Lowering, Site, Table
from vllmx_cpu.tape import Call

OPS = Table("cpu")
for family in (products, rows, attention, compressed, experts, states, images, ranks):
    OPS.include(family.OPS)


def lower(lowering: Lowering, op: Op, address: Address) -> list[Call]:
    """The calls of an op whose values lie at `address(value)`; more than one where its weight has
    several segments."""
    return OPS(op, Site(lowering, address))


def lower_all(
    lowering: Lowering, ops: Sequence[Op], offsets: Mapping[Value, int], base: int
) -> list[Call]:
    """The recorded step over one buffer at address `base`."""
    calls = images.turns(lowering)
    for op in ops:
        calls += lower(lowering, op, lambda value: base + offsets[value])
    return calls
