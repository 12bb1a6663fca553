"""`route`: which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef
from vllmx_core.records import Record


class RouteSpec(Record):
    """Choice of k among X experts. Softmax over the chosen alone is softmax over all with
    `renormalise`."""

    chosen: int  # k
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function from logits to scores: over all experts, in float32."""
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


class Route(ArrayOp):
    """logits (T, X) -> ids (T, k), by falling score + bias, ties to the lower expert, and weights
    (T, k): the scores of the chosen, without the bias, times `factor`. A row whose scores hold NaN
    gets NaN weights and ids that are experts all the same."""

    name: ClassVar[str] = "route"
    results: ClassVar[tuple[str, ...]] = ("ids", "slot_weights")
    logits: Value
    spec: RouteSpec
    bias: WeightRef | None
    factor: WeightRef | None
    ids: Value
    slot_weights: Value

    @classmethod
    def of(
        cls, logits: Value, spec: RouteSpec, bias: WeightRef | None, factor: WeightRef | None
    ) -> Route:
        expect_features(logits=logits)
        expect(isinstance(spec, RouteSpec), f"spec is {spec!r}, not a RouteSpec")
        ids = Value(spec.chosen, dtype="i32", below=logits.width)
        return cls(logits, spec, bias, factor, ids, Value(spec.chosen, dtype="f32"))

    def check(self) -> None:
        spec, count = self.spec, self.logits.width
        groups, kept = spec.groups, spec.groups_kept
        expect(spec.score in ("softmax", "sigmoid"), f"unknown score {spec.score!r}")
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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        bias, factor = frame.optional(self.bias), frame.optional(self.factor)
        frame[self.ids], frame[self.slot_weights] = route(
            frame[self.logits], self.spec, bias, factor, frame.xp
        )


def route(
    logits: Array,
    spec: RouteSpec,
    bias: Array | None = None,
    factor: Array | None = None,
    xp: Arrays = NUMPY,
) -> tuple[Array, Array]:
    """(T, X), (X,), (X,) -> ids (T, k), weights (T, k)."""
    scores = route_scores(logits, spec, xp)  # (T, X)
    choice = scores if bias is None else scores + bias
    broken = xp.isnan(choice).any(axis=1)[:, None]  # (T, 1)
    choice = xp.where(broken, 0.0, choice)  # NaN has no place in an order
    if spec.groups > 1:
        choice = of_best_groups(choice, spec, xp)
    ids = xp.falling(choice)[:, : spec.chosen]
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
    return xp.sigmoid(logits) if spec.score == "sigmoid" else xp.softmax(logits)


def of_best_groups(choice: Array, spec: RouteSpec, xp: Arrays = NUMPY) -> Array:
    """(T, X) -> the same, -inf for experts of groups that are not among the best."""
    grouped = choice.reshape(len(choice), spec.groups, -1)
    counted = 1 if spec.group_score == "max" else 2
    best = xp.take_along_axis(grouped, xp.falling(grouped)[..., :counted], axis=2).sum(axis=2)
    place = xp.argsort(xp.falling(best), axis=1)  # (T, groups) of each group, the best one 0
    kept = (place < spec.groups_kept)[:, :, None]
    return xp.where(kept, grouped, -xp.inf).reshape(choice.shape)
