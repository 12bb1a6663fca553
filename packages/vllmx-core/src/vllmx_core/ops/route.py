"""`route`: which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.records import Record

if TYPE_CHECKING:
    from vllmx_core.ops.case import Builder
    from vllmx_core.ops.recorder import Ops


class RouteSpec(Record):
    """How k of X experts are chosen. Softmax over the chosen alone is softmax over all with
    `renormalise`."""

    chosen: int  # k
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How scores come of logits: over all experts, in float32."""
    groups: int = 1
    """Experts lie in so many equal groups ..."""
    groups_kept: int = 1
    """Groups that take part, the best ones; ties go to the lower group."""
    group_score: Literal["max", "best_two"] = "max"
    """What a group counts: its best score, or the sum of its two best."""
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

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for count, chosen in ((8, 2), (7, 3), (33, 5), (128, 8), (5, 5), (1, 1), (2, 1), (259, 9)):
            yield _case(count, RouteSpec(chosen))
            yield _case(count, RouteSpec(chosen, "sigmoid", renormalise=True, eps=1e-20, scale=2.5))
        yield _case(17, RouteSpec(4, renormalise=True, eps=0.25, scale=1.5), "factor")
        yield _case(17, RouteSpec(17, renormalise=True), "bias")
        yield _case(48, RouteSpec(6, "sigmoid"), "bias", "factor")
        yield _case(48, RouteSpec(6), "bias")
        for groups, kept, chosen in ((4, 2, 3), (8, 3, 9), (8, 1, 3), (2, 2, 20), (12, 5, 4)):
            yield _case(24, RouteSpec(chosen, groups=groups, groups_kept=kept))
            spec = RouteSpec(chosen, "sigmoid", groups, kept, "best_two", True, 1e-20, 2.5)
            if 24 // groups >= 2:
                yield _case(24, spec, "bias")
        yield _ties(RouteSpec(3))
        yield _ties(RouteSpec(3, "sigmoid", 4, 2, "best_two"))
        yield _ties(RouteSpec(5, groups=6, groups_kept=3, renormalise=True))


_WIDTH = 24


def _case(count: int, spec: RouteSpec, *vectors: str) -> Case:
    def build(builder: Builder) -> None:
        builder.linear("router", count, _WIDTH)
        _experts(builder, count)
        for name in vectors:  # scores are probabilities: a bias is as large as they are
            builder.vector(name, count, centre=0.0 if name == "bias" else 1.0)

    groups = f", {spec.groups_kept} of {spec.groups} groups" if spec.groups > 1 else ""
    return Case.between(
        f"{spec.score}, {spec.chosen} of {count}{groups}{''.join(f', {v}' for v in vectors)}",
        _WIDTH,
        lambda ops, w, x: _routed(ops, w, x, spec),
        build,
    )


def _ties(spec: RouteSpec) -> Case:
    """Logits are small whole numbers, in any order of the sum: most experts have rivals."""

    def build(builder: Builder) -> None:
        builder.embedding("embed", _WIDTH).linear("router", 12, _WIDTH)
        _experts(builder, 12)
        builder.linear("head", builder.vocab_size, _WIDTH)
        few = builder.random.integers(-1, 2, (12, 2))
        builder.arrays["router.0.weight"][:] = np.pad(few, ((0, 0), (0, _WIDTH - 2)))
        table = builder.arrays["embed.weight"]
        table[:] = builder.random.integers(-1, 2, table.shape)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = _routed(ops, w, ops.embedding(step.tokens, w["embed"]), spec)
        return ops.logits(x, step.logit_rows, w["head"])

    return Case(f"ties, {spec.score}, {spec.groups} groups", build, body)


def _experts(builder: Builder, count: int) -> None:
    builder.stack("gate_up", count, (4, 4), _WIDTH).stack("down", count, (_WIDTH,), 4)


def _routed(ops: Ops, w: Weights, x: Value, spec: RouteSpec) -> Value:
    """What reaches the logits tells which experts were asked, in proportion to their weights."""
    logits = ops.linear(x, w["router"])
    ids, weights = ops.route(logits, spec, bias=w.get("bias"), factor=w.get("factor"))
    return ops.experts(x, ids, weights, w["gate_up"], w["down"], ExpertsSpec())


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
