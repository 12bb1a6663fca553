"""`route`: which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features, expect_vector, expect_weight
from vllmx_core.ops.values import ArrayFrame, TokenIds, Value, WeightRef
from vllmx_core.records import Record

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "sparsemixer")


class RouteSpec(Record):
    """Choice of k among X experts. Softmax over the chosen alone is softmax over all with
    `renormalise`."""

    chosen: int  # k
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "sparsemixer"] = "softmax"
    """The function from logits to scores: over all experts, in float32. "sqrt_softplus":
    sqrt(log(1 + exp(logit))). "sparsemixer" (arXiv:2409.12136): the weight of the i-th choice m is
    its softmax over those of the experts not chosen before whose logit x is near that of m:
    m - x <= 2 * `jitter` * max(abs(x), m)."""
    groups: int = 1
    """Experts lie in so many equal groups ..."""
    groups_kept: int = 1
    """Groups that take part, the best ones; ties go to the lower group."""
    group_score: Literal["max", "best_two"] = "max"
    """A group's score: its best one, or the sum of its two best."""
    renormalise: bool = False
    """Divides the weights by their sum + `eps`."""
    eps: float = 0.0
    scale: float = 1.0
    """Multiplies the weights, after that."""
    jitter: float = 0.01
    """The bound of "sparsemixer" for near logits."""


class Route(ArrayOp):
    """logits (T, X) -> ids (T, k), by falling score + bias, ties to the lower expert, and weights
    (T, k): the scores of the chosen, without the bias, times `factor`. A row whose scores hold NaN
    gets NaN weights and ids that are experts all the same. With a `table` (V * k,) a token goes to
    the experts that it names for the token's id ("hash layers"); there are no groups then."""

    name: ClassVar[str] = "route"
    results: ClassVar[tuple[str, ...]] = ("ids", "slot_weights")
    logits: Value
    spec: RouteSpec
    bias: WeightRef | None
    factor: WeightRef | None
    ids: Value
    slot_weights: Value
    table: WeightRef | None = None

    @classmethod
    def of(
        cls,
        logits: Value,
        spec: RouteSpec,
        bias: WeightRef | None,
        factor: WeightRef | None,
        table: WeightRef | None = None,
    ) -> Route:
        expect_features(logits=logits)
        expect(isinstance(spec, RouteSpec), f"spec is {spec!r}, not a RouteSpec")
        ids = Value(spec.chosen, dtype="i32", below=logits.width)
        slot_weights = Value(spec.chosen, dtype="f32")
        return cls(logits, spec, bias, factor, ids, slot_weights, table)

    def check(self) -> None:
        spec, count = self.spec, self.logits.width
        groups, kept = spec.groups, spec.groups_kept
        expect(spec.score in SCORES, f"unknown score {spec.score!r}")
        expect(spec.group_score in ("max", "best_two"), f"unknown group_score {spec.group_score!r}")
        equal = groups > 0 and count % groups == 0
        expect(equal, f"{count} experts do not lie in {groups} equal groups")
        expect(0 < kept <= groups, f"{kept} groups kept of {groups}")
        two = spec.group_score == "max" or groups == 1 or count // groups >= 2
        expect(two, f"the best two of groups of {count // groups} expert")
        open_to = kept * (count // groups)
        of = f"{open_to} in {kept} of {groups} groups" if groups > 1 else f"{count}"
        expect(0 < spec.chosen <= open_to, f"{spec.chosen} experts chosen of {of}")
        for weight in (self.bias, self.factor):
            if weight is not None:
                expect_vector(weight, count)
        if self.table is not None:
            expect_weight(self.table, "vector")
            listed = f"{self.table.name!r} has {self.table.rows} ids, not {spec.chosen} for a token"
            expect(self.table.rows % spec.chosen == 0 and groups == 1, listed)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        bias, factor = frame.optional(self.bias), frame.optional(self.factor)
        named = None
        if self.table is not None:
            rows = frame.vector(self.table).reshape(-1, self.spec.chosen)
            tokens = frame.ids(TokenIds())
            named = frame.xp.cast(rows[tokens], tokens.dtype)  # (T, k)
        frame[self.ids], frame[self.slot_weights] = route(
            frame[self.logits], self.spec, bias, factor, frame.xp, named
        )


def route(
    logits: Array,
    spec: RouteSpec,
    bias: Array | None = None,
    factor: Array | None = None,
    xp: Arrays = NUMPY,
    named: Array | None = None,
) -> tuple[Array, Array]:
    """(T, X), (X,), (X,) -> ids (T, k), which are `named` where that is given, weights (T, k)."""
    scores = route_scores(logits, spec, xp)  # (T, X)
    choice = scores if bias is None else scores + bias
    broken = xp.isnan(choice).any(axis=1)[:, None]  # (T, 1)
    choice = xp.where(broken, 0.0, choice)  # NaN has no place in an order
    if spec.groups > 1:
        choice = of_best_groups(choice, spec, xp)
    order = xp.falling(choice)  # (T, X)
    ids = order[:, : spec.chosen] if named is None else named
    if spec.score == "sparsemixer":
        weights = _near_weights(scores, order, spec, xp)
    else:
        weights = xp.take_along_axis(scores, ids, axis=1)
    if spec.renormalise:
        weights = weights / (weights.sum(axis=1)[:, None] + spec.eps)
    weights = weights * spec.scale
    if factor is not None:
        weights = weights * factor[ids]
    return ids, xp.where(broken, xp.nan, weights)


def route_scores(logits: Array, spec: RouteSpec, xp: Arrays = NUMPY) -> Array:
    """(T, X) before the bias."""
    logits = xp.wide(logits)
    if spec.score == "sparsemixer":
        return logits
    if spec.score == "sqrt_softplus":
        return xp.sqrt(xp.softplus(logits))
    return xp.sigmoid(logits) if spec.score == "sigmoid" else xp.softmax(logits)


def _near_weights(logits: Array, order: Array, spec: RouteSpec, xp: Arrays) -> Array:
    """(T, X) logits and experts, the best first -> (T, k), see "sparsemixer"."""
    place = xp.argsort(order, axis=1)  # (T, X) of each expert, the best one 0
    found = []
    for index in range(spec.chosen):
        most = xp.take_along_axis(logits, order[:, index : index + 1], axis=1)  # (T, 1)
        size = xp.maximum(xp.maximum(logits, -logits), most)
        far = (place < index) | (most - logits > 2 * spec.jitter * size)
        found.append(1 / xp.where(far, 0.0, xp.exp(logits - most)).sum(axis=1, keepdims=True))
    return xp.concatenate(found, axis=1)


def of_best_groups(choice: Array, spec: RouteSpec, xp: Arrays = NUMPY) -> Array:
    """(T, X) -> the same, -inf for experts of groups that are not among the best."""
    grouped = choice.reshape(len(choice), spec.groups, -1)
    counted = 1 if spec.group_score == "max" else 2
    best = xp.take_along_axis(grouped, xp.falling(grouped)[..., :counted], axis=2).sum(axis=2)
    place = xp.argsort(xp.falling(best), axis=1)  # (T, groups) of each group, the best one 0
    kept = (place < spec.groups_kept)[:, :, None]
    return xp.where(kept, grouped, -xp.inf).reshape(choice.shape)
