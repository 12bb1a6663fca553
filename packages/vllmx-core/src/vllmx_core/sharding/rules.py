"""Sharding rules of the ops: where a result may be cut, and which parts of the operands and weights
a share of it needs. Ops without a rule compute whole values on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from vllmx_core.errors import ConfigError
from vllmx_core.model import StateSpec
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.recurrence import Recurrence, RecurrenceSpec
from vllmx_core.ops.resize import Resize
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_at import ScaleAt
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.sharding.shares import Share, Units


class Cutter(Protocol):
    """Collects the decisions of the rules as they go through a step."""

    ranks: int

    def units(self, value: Value) -> Units | None:
        """The places where a value may be cut; None: it must be whole."""
        ...

    def shard(self, ref: WeightRef) -> str:
        """The weight's `WeightSpec.shard`."""
        ...

    def value(self, op: Op, value: Value, share: Share) -> None:
        """`op` reads this rank's share of the value."""
        ...

    def rows(self, op: Op, ref: WeightRef, share: Share) -> None:
        """`op` uses this rank's rows of the weight."""
        ...

    def cache(self, op: Op, layer: int, heads: range) -> None:
        """Attention of this layer keeps these kv heads."""
        ...

    def state(self, index: int, spec: StateSpec) -> None:
        """A recurrent layer keeps this of `ModelShape.states`."""
        ...


Options = dict[str, Any]
"""The options of an op that differ on a rank."""


class Rule:
    """The sharding of one type of op.

    Args:
        units: where the result may be cut, None: nowhere.
        take: requests from the cutter what a share of the result needs, and returns the op's
            options on this rank.
    """

    def __init__(
        self,
        units: Callable[[Any, Cutter], Units | None],
        take: Callable[[Any, Share, Cutter], Options],
    ) -> None:
        self.units, self.take = units, take


def _linear_units(op: Linear, cutter: Cutter) -> Units | None:
    return Units() if cutter.shard(op.w) == "column" else None


def _linear(op: Linear, share: Share, cutter: Cutter) -> Options:
    cutter.rows(op, op.w, share)
    return {}


def _pair_units(op: GatedAct, cutter: Cutter) -> Units | None:
    """Gate and up are cut alike, wherever it is."""
    return Units() if cutter.units(op.gate_up) == Units() else None


def _pair(op: GatedAct, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.gate_up, share.repeated(2))
    return {}


def _each_units(op: Act | Scale | ScaleAt | ShortConv, cutter: Cutter) -> Units | None:
    return cutter.units(op.x)


def _each(op: Act | Scale, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.x, share)
    return {}


def _scale_at(op: ScaleAt, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.x, share)
    return {"features": share.between(0, op.features).width}


def _joined(one: Units | None, other: Units | None) -> Units | None:
    return None if one is None or other is None else one.joined(other)


def _add_units(op: Add, cutter: Cutter) -> Units | None:
    return _joined(cutter.units(op.x), cutter.units(op.y))


def _add(op: Add, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.x, share)
    cutter.value(op, op.y, share)
    return {}


def _gate_units(op: Gate, cutter: Cutter) -> Units | None:
    gates = cutter.units(op.g)
    if gates is None:
        return None
    return _joined(cutter.units(op.x), Units(gates.unit * op.span, gates.sections))


def _gate(op: Gate, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.x, share)
    cutter.value(op, op.g, share.grouped(op.span))
    return {}


def _scale_by_units(op: ScaleBy, cutter: Cutter) -> Units | None:
    span = 1 if op.w.rows == 1 else op.span
    return _joined(cutter.units(op.x), Units(span))


def _scale_by(op: ScaleBy, share: Share, cutter: Cutter) -> Options:
    cutter.value(op, op.x, share)
    if op.w.rows > 1:
        cutter.rows(op, op.w, share.grouped(op.span))
    return {}


def _head_norm_units(op: HeadNorm, cutter: Cutter) -> Units | None:
    """One norm across all heads, or of the only run of features, needs all of them."""
    across = op.spec.across and (op.q_norm or op.k_norm)
    if across or op.spec.num_heads + op.spec.num_kv_heads == 1:
        return None
    return _joined(cutter.units(op.qkv), Units(op.spec.head_size))


def _head_norm(op: HeadNorm, share: Share, cutter: Cutter) -> Options:
    spec, size = op.spec, op.spec.head_size
    cutter.value(op, op.qkv, share)
    ends = (spec.num_heads * size, (spec.num_heads + spec.num_kv_heads) * size)
    q, k = share.between(0, ends[0]), share.between(*ends)
    if op.q_norm is not None:
        cutter.rows(op, op.q_norm, q)
    if op.k_norm is not None:
        cutter.rows(op, op.k_norm, k)
    return {"spec": replace(spec, num_heads=q.width // size, num_kv_heads=k.width // size)}


def _attention_units(op: Attention, cutter: Cutter) -> Units | None:
    """Kv heads with all of their query heads; with more ranks than kv heads, several ranks have
    each kv head and some of its query heads."""
    spec, ranks = op.spec, cutter.ranks
    fed = cutter.units(op.qkv)
    if fed is None or spec.head_size % fed.unit or fed.sections > 1:
        return None
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    if kv_heads >= ranks:
        return Units(heads // kv_heads * size)
    if ranks % kv_heads:
        raise ConfigError(
            f"layer {spec.layer}: {kv_heads} kv heads cannot be given to {ranks} ranks alike",
            param="tensor_parallel_size",
        )
    return Units(size, kv_heads)


def _attention(op: Attention, share: Share, cutter: Cutter) -> Options:
    spec, size = op.spec, op.spec.head_size
    ((begin, end),) = share.pieces
    first, last, group = begin // size, end // size, spec.num_heads // spec.num_kv_heads
    kept = range(first // group, -(-last // group))
    pieces = [(begin, end)]
    if not spec.shared:
        starts = (spec.num_heads, spec.num_heads + spec.num_kv_heads)
        pieces += [((at + kept.start) * size, (at + kept.stop) * size) for at in starts]
    cutter.value(op, op.qkv, Share(op.qkv.width, tuple(pieces)))
    cutter.cache(op, spec.layer, kept)
    if op.sinks is not None:
        cutter.rows(op, op.sinks, share.grouped(size))
    if op.bias is not None:
        heads = share.grouped(size)
        cutter.rows(op, op.bias, heads.repeated(op.bias.rows // heads.whole))
    return {"spec": replace(spec, num_heads=last - first, num_kv_heads=len(kept))}


def _recurrence_units(op: Recurrence, cutter: Cutter) -> Units | None:
    """Key heads with all of their heads, or with some of them if there are more ranks. Tiled heads
    are cut between tiles, in which each head has another key head, or within them."""
    spec, ranks, one = op.spec, cutter.ranks, Units()
    if any(cutter.units(x) != one for x in op.reads):
        return None
    groups = spec.num_heads // spec.num_key_heads if spec.tiled else spec.num_key_heads
    if groups >= ranks:
        return Units(spec.num_heads // groups * spec.value_size)
    if ranks % groups:
        raise ConfigError(
            f"state {spec.state}: {spec.num_heads} heads in {groups} groups cannot be given to"
            f" {ranks} ranks alike",
            param="tensor_parallel_size",
        )
    return Units(spec.value_size, groups)


def _recurrence(op: Recurrence, share: Share, cutter: Cutter) -> Options:
    spec, keys = op.spec, Share(op.spec.num_key_heads * op.spec.key_size, ())
    heads = share.grouped(spec.value_size)
    ((begin, end),) = heads.pieces
    kept = _key_heads(spec, begin, end)
    read = (kept.start * spec.key_size, kept.stop * spec.key_size)
    starts = (0, keys.whole, 2 * keys.whole)
    pieces = zip(starts, (read, read, *share.pieces), strict=True)
    features = tuple((at + first, at + last) for at, (first, last) in pieces)
    cutter.value(op, op.qkv, Share(spec.width, features))
    decays = heads.spread(spec.num_decays // spec.num_heads)
    cutter.value(op, op.a, decays)
    if op.b is not None:
        cutter.value(op, op.b, heads)
    cutter.rows(op, op.a_log, heads.spread(spec.num_rates // spec.num_heads))
    cutter.rows(op, op.dt_bias, decays)
    if op.d is not None:
        cutter.rows(op, op.d, heads)
    cutter.state(spec.state, StateSpec(end - begin, spec.key_size, spec.value_size))
    return {"spec": replace(spec, num_heads=end - begin, num_key_heads=len(kept))}


def _key_heads(spec: RecurrenceSpec, begin: int, end: int) -> range:
    """Key heads that the heads from `begin` to before `end` read."""
    if not spec.tiled:
        group = spec.num_heads // spec.num_key_heads
        return range(begin // group, -(-end // group))
    if end - begin >= spec.num_key_heads:
        return range(spec.num_key_heads)
    first = begin % spec.num_key_heads
    return range(first, first + end - begin)


def _short_conv(op: ShortConv, share: Share, cutter: Cutter) -> Options:
    """Each channel is by itself."""
    kernel = op.spec.kernel
    cutter.value(op, op.x, share)
    cutter.rows(op, op.w, share.spread(kernel))
    if op.bias is not None:
        cutter.rows(op, op.bias, share)
    cutter.state(op.spec.state, StateSpec(1, kernel - 1, share.width))
    return {}


def _resize_units(op: Resize, cutter: Cutter) -> Units | None:
    """Cuts between runs, where x may be cut. Behind features that stay, runs have their size."""
    fed = cutter.units(op.x)
    if fed is None or (op.kept and fed != Units()):
        return None
    if op.kept:
        return Units(op.resized)
    return Units(math.lcm(fed.unit, op.size) // op.size * op.resized, fed.sections)


def _resize(op: Resize, share: Share, cutter: Cutter) -> Options:
    kept = share.between(0, op.kept)
    runs = share.between(op.kept, share.whole).grouped(op.resized).spread(op.size)
    behind = tuple((op.kept + begin, op.kept + end) for begin, end in runs.pieces)
    cutter.value(op, op.x, Share(op.x.width, (*kept.pieces, *behind)))
    return {"kept": kept.width}


RULES: dict[type[Op], Rule] = {
    Linear: Rule(_linear_units, _linear),
    GatedAct: Rule(_pair_units, _pair),
    Act: Rule(_each_units, _each),
    Scale: Rule(_each_units, _each),
    Add: Rule(_add_units, _add),
    Gate: Rule(_gate_units, _gate),
    ScaleAt: Rule(_each_units, _scale_at),
    ScaleBy: Rule(_scale_by_units, _scale_by),
    HeadNorm: Rule(_head_norm_units, _head_norm),
    Attention: Rule(_attention_units, _attention),
    Recurrence: Rule(_recurrence_units, _recurrence),
    ShortConv: Rule(_each_units, _short_conv),
    Resize: Rule(_resize_units, _resize),
}
