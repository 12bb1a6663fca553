"""An activation moves into the linear that feeds it: what the linear gives is written once."""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.ops.activation import KINDS, Act
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.recorded.passes.uses import read_at_once


def fuse_activations(steps: OpList) -> OpList:
    """Every linear whose result the next op alone reads, an activation, becomes one with it."""
    pairs = {
        id(linear): Linear(linear.x, linear.w, act.out, kind)
        for linear, act in read_at_once(steps)
        if isinstance(linear, Linear) and isinstance(act, Act) and (kind := act.kind) in KINDS
    }
    fused: list[Op] = []
    following = iter(steps.ops)
    for op in following:
        fused.append(pairs.get(id(op), op))
        if id(op) in pairs:
            next(following)
    return replace(steps, ops=tuple(fused))
