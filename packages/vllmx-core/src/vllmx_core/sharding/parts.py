"""Sums whose bits do not depend on the number of ranks.

If ranks cut a matrix along its input features, the product is a sum over ranks, and floating point
rounds by the order of a sum. Here it is always the sum of the same few parts, each the product of
some features of one rank: neighbours are added in pairs, then neighbouring sums, and so on, first
within a rank, then over all (`vllmx_core.communicator.tree_sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllmx_core.communicator import tree_sum
from vllmx_core.errors import ConfigError
from vllmx_core.ops.add import Add
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.slice import Slice
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.sharding.plan import ShardPlan, WeightCut
from vllmx_core.sharding.shares import Share
from vllmx_core.sharding.weights import narrowed
from vllmx_core.weights.spec import WeightSpec

COUNTS = (4, 2)
"""Numbers of parts, the best first: the first one that divides all sums of the model is used."""
Planner = Callable[[int, int], ShardPlan]
"""A function of a rank and the number of ranks; raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the weights of one rank, as plans of as many ranks as there are parts.

    Attributes:
        first: the number of the first one among those of all ranks.
    """

    shards: tuple[ShardPlan, ...] = ()
    first: int = 0

    @property
    def weights(self) -> frozenset[str]:
        """Names of the weights that are cut into parts."""
        return frozenset(
            ref.name for shard in self.shards[:1] for op in _sums(shard) for ref in op.weights
        )

    @property
    def reordered(self) -> dict[str, WeightCut]:
        """The weights that are whole on a single rank and have rows in the order of a part's
        columns."""
        cuts = self.shards[0].weights if self.shards else {}
        return {
            name: WeightCut(Share(cut.rows.whole, ((0, cut.rows.whole),)), orders=cut.orders)
            for name, cut in cuts.items()
            if cut.orders and cut.rows and name not in self.weights
        }

    def narrowed(self, spec: WeightSpec) -> Iterator[WeightSpec]:
        """Yields the parts of a weight as weights of their own. A bias behind cut columns belongs
        to the first part of all."""
        for number, shard in enumerate(self.shards, self.first):
            cut = shard.weights[spec.name]
            part = narrowed(spec, cut, biased=number == 0)
            yield replace(part, name=_name(spec.name, number))

    def ops(
        self, op: Op, known: Mapping[Value, Value], w: Mapping[str, WeightRef], begin: int
    ) -> Iterator[Op]:
        """Ops that compute the rank's sum, which is the last one's result. `known` maps values of
        the whole to those of the rank; `begin` is the first feature of a matrix's input that the
        rank has."""
        results, adds = [], list[Op]()
        for number, shard in enumerate(self.shards, self.first):
            changes: dict[str, Any] = {
                name: known[getattr(op, name)]
                for name in ("x", "ids", "slot_weights")
                if hasattr(op, name)
            }
            for name in ("w", "gate_up", "down"):
                if hasattr(op, name):
                    changes[name] = w[_name(getattr(op, name).name, number)]
            if isinstance(op, Linear):
                first, end = shard.weights[op.w.name].cols or (0, op.w.cols)
                if changes["x"].width > end - first:
                    piece = Slice.of(changes["x"], first - begin, end - first)
                    changes["x"] = piece.out
                    yield piece
            (whole,) = op.writes
            changes |= shard.options.get(op, {})
            result = replace(op, **changes, out=replace(whole))  # type: ignore[call-arg]
            results.append(result.writes[0])
            yield result

        def add(x: Value, y: Value) -> Value:
            adds.append(Add.of(x, y))
            return adds[-1].writes[0]

        tree_sum(results, add)
        yield from adds

    def sums(self, op: Op) -> bool:
        """True if an op is one of those sums."""
        return bool(self.shards) and op in _sums(self.shards[0])


def parts_of_rank(shard_of: Planner, rank: int, ranks: int) -> Parts:
    """The parts of a rank. Raises ConfigError if the model's sums cannot be cut, or if the parts
    cannot be divided evenly among the ranks."""
    count = next((count for count in COUNTS if fits(shard_of, count)), 1)
    if ranks > count or count % ranks:
        fitting = " or ".join(str(one) for one in (1, 2, 4) if one <= count)
        raise ConfigError(
            f"--deterministic cuts each sum of this model into {count} parts, which {ranks} ranks"
            f" cannot share: choose --tensor-parallel-size {fitting}, or leave it out",
            param="deterministic",
        )
    each = count // ranks
    if count == 1:
        return Parts()
    first = rank * each
    return Parts(tuple(shard_of(number, count) for number in range(first, first + each)), first)


def fits(shard_of: Planner, count: int) -> bool:
    """True if a model can be cut among `count` ranks, or into `count` parts."""
    if count == 1:
        return True
    try:
        shard_of(0, count)
    except ConfigError:
        return False
    return True


def _sums(shard: ShardPlan) -> list[Op]:
    return [op for op in shard.reduced if isinstance(op, Linear | Experts)]


def _name(weight: str, number: int) -> str:
    return f"{weight}.part{number}"
