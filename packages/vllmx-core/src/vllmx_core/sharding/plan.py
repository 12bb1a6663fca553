"""Plans one rank's share of each value and weight of a recorded step.

The step is read backwards. A chain begins at an op whose weight is cut along its input features, or
whose rows are the vocabulary: it reads a share of its operand, and a collective after it makes the
result whole. The op that computes that operand needs shares of its own operands and weights, and so
on, up to a matrix whose output features are cut, which reads a whole value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from vllmx_core.errors import ConfigError, OpError
from vllmx_core.model import StateSpec
from vllmx_core.ops.activation import Act
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.records import MutableRecord, Record, field
from vllmx_core.sharding.rules import RULES, Options
from vllmx_core.sharding.shares import Piece, Share, Units, divided
from vllmx_core.weights.spec import WeightSpec

VOCABULARY_UNIT = 64
"""Rows of the vocabulary that stay together where there are many."""


class Columns(Record):
    """The places where a weight may be cut along its input features."""

    unit: int
    """Cuts are at multiples of so many."""
    orders: tuple[bytes, ...] = ()
    """Set if groups only stay whole in another order of the features: an int32 order for each
    matrix."""
    ordered_unit: int = 1
    """Cuts are at multiples of so many features in that order."""


ColumnsOf = Callable[[WeightSpec], Columns]


class WeightCut(MutableRecord):
    """A rank's part of a weight."""

    rows: Share | None = None
    cols: Piece | None = None
    matrices: Piece | None = None
    """The matrices of a stack that are taken."""
    orders: tuple[bytes, ...] = ()
    """The int32 order in which `rows` or `cols` number the features of each matrix, rows run by
    run; empty: unchanged."""


class ShardPlan(MutableRecord):
    """One rank's part of a step."""

    values: dict[Value, Share] = field(default_factory=dict)
    """The rank's share of each value that no rank has whole."""
    weights: dict[str, WeightCut] = field(default_factory=dict)
    kv_heads: dict[int, range] = field(default_factory=dict)
    """The heads of keys and values that the rank has, for each attention layer."""
    states: dict[int, StateSpec] = field(default_factory=dict)
    """The rank's share of the states that ranks divide, by index in `ModelShape.states`."""
    options: dict[Op, Options] = field(default_factory=dict)
    reduced: set[Op] = field(default_factory=set)
    """Ops whose results are added over all ranks."""
    combined: dict[Op, tuple[int, ...]] = field(default_factory=dict)
    """Experts whose results are added token by token, with one past the last expert of each rank.
    """
    vocabulary: dict[Op, tuple[Piece, ...]] = field(default_factory=dict)
    """Heads and embeddings, with the ids of each rank."""


def plan_shards(
    steps: OpList,
    specs: Mapping[str, WeightSpec],
    columns: ColumnsOf,
    rank: int,
    ranks: int,
    *,
    whole_experts: bool = False,
    combines: bool = False,
) -> ShardPlan:
    """Plans all ops. Ranks have a part of each expert, or with `whole_experts` some experts each,
    whose results are added token by token if `combines`. Raises ConfigError if sizes cannot be
    divided among `ranks`, OpError if an op needs a whole value that another op has cut."""
    return _Cutter(steps, specs, columns, rank, ranks, whole_experts, combines).run()


class _Cutter:
    """The pass over one step; see `vllmx_core.sharding.rules.Cutter`."""

    def __init__(
        self,
        steps: OpList,
        specs: Mapping[str, WeightSpec],
        columns: ColumnsOf,
        rank: int,
        ranks: int,
        whole_experts: bool,
        combines: bool,
    ) -> None:
        self.ranks = ranks
        self._whole_experts, self._combines = whole_experts, combines
        self._rank, self._specs, self._columns = rank, specs, columns
        self._ops = steps.ops
        self._made_by = {value: op for op in steps.ops for value in op.writes}
        self._readers = Counter(value for op in steps.ops for value in op.reads)
        self._users = Counter(ref.name for op in steps.ops for ref in op.weights)
        self._units: dict[Value, Units | None] = {}
        self._whole: dict[Value, Op] = {}
        """Values that some op needs whole, and the op."""
        self._uncut: dict[str, Op] = {}
        """Weights that some op needs whole, and the op."""
        self._taken: set[tuple[Op, Value | str]] = set()
        """The values and weights of which an op takes a part."""
        self._orders: dict[str, tuple[bytes, ...]] = {}
        """`WeightCut.orders` by the weight's name."""
        self._shard = ShardPlan()

    def run(self) -> ShardPlan:
        for op in reversed(self._ops):
            share = next(
                (self._shard.values[v] for v in op.writes if v in self._shard.values), None
            )
            if share is None:
                self._begin(op)
            else:
                options = RULES[type(op)].take(op, share, self)
                if options:
                    self._shard.options[op] = options
            self._check(op)
        self._check_weights()
        return self._shard

    # --- what the rules call ----------------------------------------------------------------------
    def units(self, value: Value) -> Units | None:
        if value not in self._units:
            made_by = self._made_by[value]
            rule = RULES.get(type(made_by))
            self._units[value] = None if rule is None else rule.units(made_by, self)
        return self._units[value]

    def shard(self, ref: WeightRef) -> str:
        return self._specs[ref.name].shard

    def value(self, op: Op, value: Value, share: Share) -> None:
        assert value.width == share.whole, (op, value.width, share)
        known = self._shard.values.setdefault(value, share)
        if known != share:
            raise OpError(f"{op} reads other features of a value than another op, which is cut")
        self._taken.add((op, value))

    def rows(self, op: Op, ref: WeightRef, share: Share) -> None:
        self._cut(op, ref, WeightCut(rows=share))

    def cache(self, op: Op, layer: int, heads: range) -> None:
        if self._shard.kv_heads.setdefault(layer, heads) != heads:
            raise OpError(f"{op} reads other kv heads than another op of its layer")

    def state(self, index: int, spec: StateSpec) -> None:
        self._shard.states[index] = spec

    # --- where cuts begin -------------------------------------------------------------------------
    def _begin(self, op: Op) -> None:
        match op:
            case Linear() if self.shard(op.w) == "row":
                units = self.units(op.x)
                if units is not None:
                    self._reorder(self._matrix_behind(op), op.w)
                    piece = self._divide_cols(op, op.w, units)
                    self.value(op, op.x, Share(op.x.width, (piece,)))
                    self._shard.reduced.add(op)
            case Experts() if self.shard(op.down) == "expert" and self._whole_experts:
                self._divide_experts(op)
            case Experts() if self.shard(op.down) == "expert":
                self._reorder(op.gate_up, op.down)
                piece = self._divide_cols(op, op.down, Units())
                share = Share(op.inner, (piece,))
                self.rows(op, op.gate_up, share.repeated(2) if op.spec.gated else share)
                self._shard.reduced.add(op)
            case Head() if self.shard(op.w) == "vocab":
                self._divide_vocabulary(op)
            case Embedding() if self.shard(op.w) == "vocab" and op.ids.source == "tokens":
                self._divide_vocabulary(op)
                self._shard.reduced.add(op)

    def _divide_experts(self, op: Experts) -> None:
        if op.down.count < self.ranks:
            raise ConfigError(
                f"{op.down.count} experts of {op.down.name!r} are for at most as many ranks",
                param="tensor_parallel_size",
            )
        parts = divided(op.down.count, Units(), self.ranks, "experts")
        for ref in (op.gate_up, op.down):
            self._cut(op, ref, WeightCut(matrices=parts[self._rank]))
        self._shard.options[op] = {"first": parts[self._rank][0]}
        if self._combines:
            self._shard.combined[op] = tuple(end for _, end in parts)
        else:
            self._shard.reduced.add(op)

    def _matrix_behind(self, op: Linear) -> WeightRef | None:
        """The matrix whose features, activated one by one, are the input of `op` and of no other
        op."""
        value = op.x
        while self._readers[value] == 1 and value in self._made_by:
            made_by = self._made_by[value]
            if isinstance(made_by, Linear):
                return made_by.w if self.shard(made_by.w) == "column" else None
            if not isinstance(made_by, GatedAct | Act):
                return None
            (value,) = made_by.reads
        return None

    def _reorder(self, behind: WeightRef | None, ref: WeightRef) -> None:
        """Numbers the features between two matrices in the order of the second one's groups, if
        possible, so that ranks have whole groups."""
        orders = self._columns(self._specs[ref.name]).orders
        if not orders or behind is None or self._users[behind.name] + self._users[ref.name] > 2:
            return
        if all(part.rows % ref.cols == 0 for part in self._specs[behind.name].parts):
            self._orders[behind.name] = self._orders[ref.name] = orders

    def _divide_cols(self, op: Op, ref: WeightRef, units: Units) -> Piece:
        columns = self._columns(self._specs[ref.name])
        own = Units(columns.unit)
        if ref.name in self._orders:
            own = Units(columns.ordered_unit)
        parts = divided(ref.cols, units.joined(own), self.ranks, f"weight {ref.name!r}")
        piece = parts[self._rank]
        self._cut(op, ref, WeightCut(cols=piece))
        return piece

    def _divide_vocabulary(self, op: Head | Embedding) -> None:
        count = op.w.rows
        unit = VOCABULARY_UNIT if count >= 2 * VOCABULARY_UNIT * self.ranks else 1
        parts = divided(count, Units(unit), self.ranks, f"weight {op.w.name!r}")
        self._shard.vocabulary[op] = parts
        self.rows(op, op.w, Share(count, (parts[self._rank],)))

    def _cut(self, op: Op, ref: WeightRef, cut: WeightCut) -> None:
        if cut.matrices is None:
            cut.orders = self._orders.get(ref.name, ())
        if self._shard.weights.setdefault(ref.name, cut) != cut:
            raise OpError(f"{op} takes another part of its weight than another op")
        self._taken.add((op, ref.name))

    # --- what must be whole -----------------------------------------------------------------------
    def _check(self, op: Op) -> None:
        """Notes the values and weights of which an op requested no share, so that it reads them
        whole. Raises OpError for a result that is both cut and read whole: its readers came first.
        """
        for value in op.reads:
            if (op, value) not in self._taken:
                self._whole.setdefault(value, op)
        for value in op.writes:
            if value in self._shard.values and value in self._whole:
                reader = self._whole[value]
                raise OpError(f"{reader} needs the result of {op} whole, of which ranks have parts")
        for ref in op.weights:
            if (op, ref.name) not in self._taken:
                self._uncut.setdefault(ref.name, op)

    def _check_weights(self) -> None:
        for name, op in self._uncut.items():
            if name in self._shard.weights:
                raise OpError(f"{op} needs weight {name!r} whole, which another op has cut")
