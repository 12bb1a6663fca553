"""Passes: functions from a recorded step to a recorded step, run before a backend lowers it.

A pass knows no device, and a backend does not know the purpose of a pass. They run in this order:

1. *What the model is*: sharding puts an all-reduce behind each linear whose weight is cut along its
   input features and gives attention its share of the heads; an adapter puts an op behind each
   linear that it changes; a tap copies values out. They go to `record(..., passes=...)`, so that
   `supports` is asked for what they put in.
2. *What the backend lacks*: `expand_unsupported` replaces ops by those that they expand into.
   `vllmx_core.recorded.recording.prepare` runs it for every backend.
3. *What is faster*: fusions. A backend runs those that it has the ops for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise

from vllmx_core.ops.activation import KINDS, Act
from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value

Pass = Callable[[OpList], OpList]
Supports = Callable[[Op], bool]


# --- adapters ------------------------------------------------------------------------------------
def with_adapters(steps: OpList) -> OpList:
    """Puts `adapt` behind each product and table that an adapter may change: before a fused
    activation, and before the sum over ranks."""
    return replace(steps, ops=tuple(one for op in steps.ops for one in _adapted(op)))


def _adapted(op: Op) -> Iterator[Op]:
    is_head = isinstance(op, Head) and op.softcap is None  # a soft cap is taken of the sum
    is_table = isinstance(op, Embedding) and op.ids.source == "tokens"
    if not (is_head or is_table or isinstance(op, Linear)):
        yield op
        return
    assert isinstance(op, Linear | Head | Embedding)
    before = replace(op.out)  # another value: identity is what tells two apart
    yield replace(op, out=before)
    x = op.ids if isinstance(op, Embedding) else op.x
    yield Adapt(x, before, op.w, op.out)


# --- expansion ------------------------------------------------------------------------------------
def expand_unsupported(steps: OpList, supports: Supports) -> OpList:
    """Expands ops that `supports` refuses, recursively. An op without a supported expansion stays,
    for `unsupported_ops` to find."""
    ops = tuple(one for op in steps.ops for one in _expanded(op, supports))
    return replace(steps, ops=ops)


def unsupported_ops(steps: OpList, supports: Supports) -> list[Op]:
    """The ops that the backend supports neither directly nor by expansion."""
    return [op for op in expand_unsupported(steps, supports).ops if not supports(op)]


def _expanded(op: Op, supports: Supports) -> Iterator[Op]:
    if not supports(op):
        parts = [one for part in op.expand() for one in _expanded(part, supports)]
        if parts and all(map(supports, parts)):
            yield from parts
            return
    yield op


# --- reads ----------------------------------------------------------------------------------------
def num_reads(steps: OpList) -> Counter[Value]:
    """Counts the reads of each value; the logits count once more, for the sampler."""
    reads = Counter(value for op in steps.ops for value in op.reads)
    reads[steps.logits] += 1
    return reads


def read_at_once(steps: OpList) -> list[tuple[Op, Op]]:
    """(op, the next op) if only the next op reads the op's first result, and once, so that a fusion
    may drop that value."""
    reads = num_reads(steps)
    return [
        (op, following)
        for op, following in pairwise(steps.ops)
        if op.writes and reads[op.writes[0]] == 1 and op.writes[0] in following.reads
    ]


# --- fusions --------------------------------------------------------------------------------------
def fuse_activations(steps: OpList) -> OpList:
    """Moves an activation into the linear before it, if nothing else reads that linear's result."""
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


def gated_weights(steps: OpList) -> frozenset[str]:
    """Names of the weights whose every use is a linear that feeds a gated activation alone: such a
    weight can be packed with gate and up rows side by side."""
    reads = num_reads(steps)
    linears = {op.out: op for op in steps.ops if isinstance(op, Linear)}
    gated = Counter(
        linears[op.gate_up].w.name
        for op in steps.ops
        if isinstance(op, GatedAct)
        and op.limit is None
        and op.gate_up in linears
        and reads[op.gate_up] == 1
    )
    total = Counter(ref.name for op in steps.ops for ref in op.weights)
    return frozenset(name for name, count in gated.items() if count == total[name])


def fuse_gated_linears(steps: OpList, weights: Collection[str]) -> OpList:
    """Moves gated activations into the linears over `weights`, some of `gated_weights`, so that
    (T, 2F) is never written."""
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
