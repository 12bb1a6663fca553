"""A dense feed-forward and experts in parallel, each with its own norms.

X experts, F features inside of each, E hidden size, T tokens, k experts of a token.
"""

from __future__ import annotations

from vllmx_core.model import Array
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import LayerNames, LayerScope, part, vector
from vllmx_models.blocks.moe import EachExpert, EitherExperts, StackedExperts, expert_stack
from vllmx_models.blocks.norms import Norm

_TENSORS = EitherExperts(StackedExperts(), EachExpert())
"""Quantised checkpoints have one tensor for each expert."""


class DenseAndExperts(Record):
    """norm1(dense(x)) + norm2(experts(norm(stream))), as in Gemma 4: the router and the experts
    read the stream, each by a norm of its own."""

    dense: DenseMLP
    count: int  # X
    chosen: int  # k
    intermediate_size: int  # F
    norm: Norm

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, hidden = names.ours, names.theirs, names.hidden_size
        router = (part(f"{theirs}.router.proj", self.count, False),)
        experts = range(self.count)
        rows = self.intermediate_size
        first = tuple(one for i in experts for one in _TENSORS.first(theirs, i, rows))
        down = tuple(one for i in experts for one in _TENSORS.down(theirs, i, hidden))
        norms = {
            "dense_post_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_post_norm": "post_feedforward_layernorm_2",
        }
        return (
            *self.dense.weights(names),
            vector(f"{ours}.router_norm", f"{theirs}.router.scale", hidden),
            WeightSpec(f"{ours}.router", "linear", router, hidden, role="router"),
            vector(f"{ours}.expert_scale", f"{theirs}.router.per_expert_scale", self.count),
            expert_stack(f"{ours}.experts.gate_up", first, hidden, self.count),
            expert_stack(f"{ours}.experts.down", down, rows, self.count),
            *(
                weight
                for name, module in norms.items()
                for weight in self.norm.weights(f"{ours}.{name}", f"{theirs}.{module}", hidden)
            ),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, w, stream = scope.ops, scope.weight, scope.stream
        assert stream is not None
        dense = self._normed(self.dense.record(x, scope), scope, "dense_post_norm")
        seen = ops.rms_norm(stream, w("router_norm"), self.norm.eps)  # (T, E)
        scores = ops.scale(ops.linear(seen, w("router")), w("router").cols ** -0.5)  # (T, X)
        route = RouteSpec(self.chosen, renormalise=True)
        ids, weights = ops.route(scores, route, factor=w("expert_scale"))  # (T, k)
        spec = ExpertsSpec(self.dense.activation)
        read = self._normed(stream, scope, "experts_norm")
        stacks = w("experts.gate_up"), w("experts.down")
        routed = ops.experts(read, ids, weights, *stacks, spec)  # (T, E)
        return ops.add(dense, self._normed(routed, scope, "experts_post_norm"))

    def _normed(self, x: Array, scope: LayerScope, name: str) -> Array:
        return self.norm.record(scope.ops, x, scope.weights, f"layers.{scope.layer}.{name}")
