"""`route`: which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.values import Value, WeightRef
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


class Route(Op):
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

    def compute(self, frame: NumpyFrame) -> None:
        bias = None if self.bias is None else frame.weight(self.bias)
        factor = None if self.factor is None else frame.weight(self.factor)
        frame[self.ids], frame[self.slot_weights] = route(
            frame[self.logits], self.spec, bias, factor
        )


def route(
    logits: Floats, spec: RouteSpec, bias: Floats | None = None, factor: Floats | None = None
) -> tuple[npt.NDArray[np.int32], Floats]:
    """(T, X), (X,), (X,) -> ids (T, k), weights (T, k)."""
    scores = _scores(logits, spec)  # (T, X)
    choice = scores if bias is None else scores + bias
    broken = np.isnan(choice).any(axis=1)  # (T,)
    if spec.groups > 1:
        choice = np.where(_taking_part(choice, spec), choice, -np.inf)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : spec.chosen]
    weights = np.take_along_axis(scores, ids, axis=1)
    if spec.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + spec.eps)
    weights = weights * spec.scale
    if factor is not None:
        weights = weights * factor[ids]
    weights[broken] = np.nan
    return ids.astype(np.int32), like(logits, weights)


def _scores(logits: Floats, spec: RouteSpec) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite logit gives NaN, or 0
        if spec.score == "sigmoid":
            return like(logits, 1 / (1 + np.exp(-logits)))
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return like(logits, raised / raised.sum(axis=1, keepdims=True))


def _taking_part(choice: Floats, spec: RouteSpec) -> npt.NDArray[np.bool_]:
    """(T, X) whether an expert's group is one of the best."""
    rows, count = choice.shape
    grouped: Any = np.sort(choice.reshape(rows, spec.groups, -1), axis=2)
    best = grouped[:, :, -1] if spec.group_score == "max" else grouped[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, : spec.groups_kept]
    mask = np.zeros((rows, spec.groups), np.bool_)
    np.put_along_axis(mask, kept, True, axis=1)
    return mask.repeat(count // spec.groups, axis=1)
