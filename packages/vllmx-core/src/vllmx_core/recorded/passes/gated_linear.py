"""A gated activation moves into the linear that feeds it: (T, 2F) is never written.

Its weight may then be packed with gate and up rows side by side, which is why the weights are
chosen first, by `gated_weights`: all uses of a weight must want that layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value
from vllmx_core.recorded.passes.uses import num_reads


def gated_weights(steps: OpList) -> frozenset[str]:
    """Names of the weights whose every use is a linear that feeds a gated activation alone."""
    reads = num_reads(steps)
    linears = {op.out: op for op in steps.ops if isinstance(op, Linear)}
    gated = Counter(
        linears[op.gate_up].w.name
        for op in steps.ops
        if isinstance(op, GatedAct) and op.gate_up in linears and reads[op.gate_up] == 1
    )
    total = Counter(ref.name for op in steps.ops for ref in op.weights)
    return frozenset(name for name, count in gated.items() if count == total[name])


def fuse_gated_linears(steps: OpList, weights: Collection[str]) -> OpList:
    """The linears over `weights`, which are some of `gated_weights`, with their activations in
    them."""
    fused: list[Op] = []
    places: dict[Value, int] = {}
    for op in steps.ops:
        if isinstance(op, GatedAct) and op.gate_up in places:
            linear = fused[places[op.gate_up]]
            assert isinstance(linear, Linear)
            fused[places[op.gate_up]] = GatedLinear(linear.x, linear.w, op.kind, op.out)
            continue
        if isinstance(op, Linear) and op.w.name in weights:
            places[op.out] = len(fused)
        fused.append(op)
    return replace(steps, ops=tuple(fused))
