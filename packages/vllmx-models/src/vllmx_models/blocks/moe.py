"""The mixture of experts: a router, stacked experts and optionally a shared expert.

X experts, F features inside of each, E hidden size, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from vllmx_core.model import Array
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import LayerNames, LayerScope, part, vector

SWIGLU = ExpertsSpec()
"""silu(gate) * up."""


class ExpertTensors(Protocol):
    """The layout of experts in a checkpoint."""

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        """The parts of an expert's first matrix: gate (rows, E) and up (rows, E)."""
        ...

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        """The parts of an expert's second matrix (rows, F)."""
        ...


class EachExpert(Record):
    """Tensors of their own for every expert: experts.5.gate_proj.weight"""

    gate: str | None = "gate_proj"
    """None: experts have no gate."""
    up: str = "up_proj"
    down_name: str = "down_proj"
    bias: bool = False

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        names = [self.up] if self.gate is None else [self.gate, self.up]
        return tuple(part(f"{module}.experts.{expert}.{name}", rows, self.bias) for name in names)

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return (part(f"{module}.experts.{expert}.{self.down_name}", rows, self.bias),)


class StackedExperts(Record):
    """One tensor (X, 2F, E) with gate and up of all experts, one (X, E, F) with their down."""

    gate_up: str = "experts.gate_up_proj"
    down_name: str = "experts.down_proj"
    interleaved: bool = False
    """True if rows of gate and up alternate; else all rows of gate come first."""
    transposed: bool | None = False
    """True if both are stored as (X, input features, output features); None: the shapes tell."""
    bias: bool = False
    """Named as the tensor plus "_bias"."""

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        halves = (
            (RowRuns(0, 1, 2), RowRuns(1, 1, 2))
            if self.interleaved
            else (RowRuns(0, rows, rows), RowRuns(rows, rows, rows))
        )
        return tuple(self._part(f"{module}.{self.gate_up}", expert, rows, runs) for runs in halves)

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return (self._part(f"{module}.{self.down_name}", expert, rows, None),)

    def _part(self, name: str, expert: int, rows: int, runs: RowRuns | None) -> PartSpec:
        bias = f"{name}_bias" if self.bias else None
        return PartSpec(name, rows, bias, entry=expert, transposed=self.transposed, runs=runs)


class JoinedExperts(Record):
    """Two tensors for every expert, the first with gate and up fused: input_linear.5.weight"""

    gate_up: str
    down_name: str

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        name = f"{module}.{self.gate_up}.{expert}.weight"
        return tuple(PartSpec(name, rows, runs=RowRuns(at, rows, rows)) for at in (0, rows))

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return (PartSpec(f"{module}.{self.down_name}.{expert}.weight", rows),)


class EitherExperts(Record):
    """Two alternative layouts, for checkpoints that differ."""

    usual: ExpertTensors = EachExpert()
    other: ExpertTensors = StackedExperts()

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return self._both(
            self.usual.first(module, expert, rows), self.other.first(module, expert, rows)
        )

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return self._both(
            self.usual.down(module, expert, rows), self.other.down(module, expert, rows)
        )

    @staticmethod
    def _both(usual: tuple[PartSpec, ...], other: tuple[PartSpec, ...]) -> tuple[PartSpec, ...]:
        pairs = zip(usual, other, strict=True)
        return tuple(replace(one, alternatives=(second,)) for one, second in pairs)


class Router(Record):
    """The matrix that scores experts, and the rule that selects them."""

    route: RouteSpec
    name: str = "gate"
    """The module's name within the feed-forward's."""
    bias: bool = False
    choice_bias: str | None = None
    """A bias vector in the feed-forward's module that affects only the selection."""
    choice_axes: int = 1
    """2: the bias is stored as (1, X)."""
    table: tuple[str, int] | None = None
    """A tensor (V, k) in the feed-forward's module with the experts of each token id, and V."""


class LatentExperts(Record):
    """Experts of a smaller hidden size than the stream, between two projections."""

    size: int
    before: str
    """The module of the down projection to the latent size."""
    after: str
    """The module of the projection back."""


class MoE(Record):
    """A `FeedForward` of `count` experts, a few of which process each token."""

    count: int  # X
    intermediate_size: int  # F
    router: Router
    spec: ExpertsSpec = SWIGLU
    tensors: ExpertTensors = EachExpert()
    shared: DenseMLP | None = None
    """The shared expert, which every token uses in addition to its routed experts."""
    shared_gate: str | None = None
    """The module of a matrix (1, E); its sigmoid weights the shared expert."""
    latent: LatentExperts | None = None
    module: str = "mlp"
    scaled_input: bool = False
    """True if an expert reads its input times its weight, and its output counts as it is; for one
    chosen expert."""

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, hidden = names.ours, f"{names.theirs}.{self.module}", names.hidden_size
        router, rows = self.router, self.intermediate_size
        score = (part(f"{theirs}.{router.name}", self.count, router.bias),)
        specs = [WeightSpec(f"{ours}.router", "linear", score, hidden, role="router")]
        if router.choice_bias is not None:
            bias = f"{theirs}.{router.choice_bias}"
            shape = None if router.choice_axes == 1 else (1, self.count)
            spec = vector(f"{ours}.choice_bias", bias, self.count)
            specs.append(replace(spec, shape=shape))
        if router.table is not None:
            name, chosen = f"{theirs}.{router.table[0]}", router.route.chosen
            spec = vector(f"{ours}.expert_table", name, router.table[1] * chosen)
            specs.append(replace(spec, shape=(router.table[1], chosen), role="ids"))
        numbers = range(self.count)
        first = tuple(one for i in numbers for one in self.tensors.first(theirs, i, rows))
        width = hidden if self.latent is None else self.latent.size
        down = tuple(one for i in numbers for one in self.tensors.down(theirs, i, width))
        specs += (
            expert_stack(f"{ours}.experts.gate_up", first, width, self.count),
            expert_stack(f"{ours}.experts.down", down, rows, self.count),
        )
        if self.latent is not None:
            before = (part(f"{theirs}.{self.latent.before}", width, False),)
            after = (part(f"{theirs}.{self.latent.after}", hidden, False),)
            specs.append(WeightSpec(f"{ours}.experts.before", "linear", before, hidden))
            specs.append(WeightSpec(f"{ours}.experts.after", "linear", after, width))
        if self.shared is not None:
            specs += self.shared.weights(names)
        if self.shared_gate is not None:
            gate = (part(f"{theirs}.{self.shared_gate}", 1, False),)
            specs.append(WeightSpec(f"{ours}.shared_gate", "linear", gate, hidden, role="router"))
        return tuple(specs)

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        scores = ops.linear(x, weight("router"))  # (T, X)
        bias = None if self.router.choice_bias is None else weight("choice_bias")
        table = None if self.router.table is None else weight("expert_table")
        ids, weights = ops.route(scores, self.router.route, bias=bias, table=table)  # (T, k)
        stacks = weight("experts.gate_up"), weight("experts.down")
        read = x if self.latent is None else ops.linear(x, weight("experts.before"))
        if self.scaled_input:
            assert self.router.route.chosen == 1
            read = ops.gate(read, weights, "identity")
            ids, weights = ops.route(scores, RouteSpec(1, renormalise=True))  # weights are 1
        out = ops.experts(read, ids, weights, *stacks, self.spec)
        if self.latent is not None:
            out = ops.linear(out, weight("experts.after"))  # (T, E)
        if self.shared is None:
            return out
        shared = self.shared.record(x, scope)  # (T, E)
        if self.shared_gate is not None:
            shared = ops.gate(shared, ops.linear(x, weight("shared_gate")), "sigmoid")
        return ops.add(out, shared)


def expert_stack(name: str, parts: tuple[PartSpec, ...], cols: int, count: int) -> WeightSpec:
    """One line of the weight map for a matrix of each of `count` experts."""
    return WeightSpec(name, "stack", parts, cols, "expert", role="experts", count=count)
