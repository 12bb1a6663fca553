"""Cases of routing and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from vllmx_core.ops.activation import KINDS as ACTIVATIONS
from vllmx_core.ops.experts import Experts, ExpertsSpec
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.route import Route, RouteSpec
from vllmx_core.ops.values import StepInputs, Value

from vllmx_testing.op_case import Case, Weights, cases_of
from vllmx_testing.synthetic import Builder


@cases_of(Experts)
def _experts_cases() -> Iterator[Case]:
    for width, inner, count, chosen in (
        (16, 24, 4, 2),
        (33, 17, 5, 3),
        (48, 64, 6, 6),
        (130, 20, 3, 1),
        (24, 1, 1, 1),
        (20, 259, 2, 2),
        (16, 8, 40, 1),
    ):
        yield _experts_case(width, inner, count, chosen, ExpertsSpec())
        yield _experts_case(width, inner, count, chosen, ExpertsSpec(), biased=True)
    for kind in ACTIVATIONS:
        yield _experts_case(24, 20, 4, 2, ExpertsSpec(kind, gated=False), biased=True)
        yield _experts_case(24, 20, 4, 2, ExpertsSpec(kind))
    yield _experts_case(24, 20, 4, 2, ExpertsSpec("relu2", gated=False))
    for clamp, alpha in ((7.0, 1.702), (0.5, 1.0)):
        yield _experts_case(24, 20, 4, 2, ExpertsSpec(clamp=clamp, alpha=alpha), biased=True)
    clamped = ExpertsSpec(clamp=0.6, alpha=None)
    yield _experts_case(24, 20, 4, 2, clamped, biased=True)
    for first, held in ((0, 3), (2, 3), (5, 2), (6, 1)):
        yield _experts_case(24, 20, held, 2, ExpertsSpec(), biased=True, others=(first, 7))
    yield _experts_case(16, 8, 2, 1, ExpertsSpec(), others=(31, 40))  # most tokens ask none of them


def _experts_case(
    width: int,
    inner: int,
    count: int,
    chosen: int,
    spec: ExpertsSpec,
    biased: bool = False,
    others: tuple[int, int] | None = None,
) -> Case:
    """A model around the op; `others` says that the experts are `count` of more: the number of the
    first, and of all."""
    from vllmx_core.ops.route import RouteSpec

    parts = (inner, inner) if spec.gated else (inner,)
    first, total = others or (None, count)

    def build(builder: Builder) -> None:
        builder.linear("router", total, width)
        builder.stack("gate_up", count, parts, width, range(len(parts)) if biased else ())
        builder.stack("down", count, (width,), inner, (0,) if biased else ())

    def middle(ops: Ops, w: Weights, x: Value) -> Value:
        """Far into both tails of the activation."""
        router = ops.linear(x, w["router"])
        ids, weights = ops.route(router, RouteSpec(chosen, renormalise=True))
        mine = Experts.of(ops.scale(x, 4.0), ids, weights, w["gate_up"], w["down"], spec)
        mine = replace(mine, first=first)
        ops.put(mine)
        return ops.add(x, mine.out) if others else mine.out

    held = "" if others is None else f" with {count} from {first} on"
    name = f"{width} by {inner}, {chosen} of {total}{held}"
    return Case.between(_experts_name(name, spec, biased), width, middle, build)


def _experts_name(sizes: str, spec: ExpertsSpec, biased: bool) -> str:
    words: Sequence[str] = (
        f"{sizes}, {spec.activation}",
        "" if spec.gated else "no gate",
        "" if spec.clamp is None else f"clamp {spec.clamp}",
        "no alpha" if spec.alpha is None else "",
        "biased" if biased else "",
    )
    return ", ".join(word for word in words if word)


@cases_of(Route)
def _route_cases() -> Iterator[Case]:
    for count, chosen in ((8, 2), (7, 3), (33, 5), (128, 8), (5, 5), (1, 1), (2, 1), (259, 9)):
        yield _route_case(count, RouteSpec(chosen))
        yield _route_case(
            count, RouteSpec(chosen, "sigmoid", renormalise=True, eps=1e-20, scale=2.5)
        )
    yield _route_case(17, RouteSpec(4, renormalise=True, eps=0.25, scale=1.5), "factor")
    yield _route_case(17, RouteSpec(17, renormalise=True), "bias")
    yield _route_case(48, RouteSpec(6, "sigmoid"), "bias", "factor")
    yield _route_case(48, RouteSpec(6), "bias")
    for groups, kept, chosen in ((4, 2, 3), (8, 3, 9), (8, 1, 3), (2, 2, 20), (12, 5, 4)):
        yield _route_case(24, RouteSpec(chosen, groups=groups, groups_kept=kept))
        spec = RouteSpec(chosen, "sigmoid", groups, kept, "best_two", True, 1e-20, 2.5)
        if 24 // groups >= 2:
            yield _route_case(24, spec, "bias")
    for score in ("sqrt_softplus", "sigmoid"):
        spec = RouteSpec(4, score, renormalise=True, eps=1e-20, scale=1.5)
        yield _route_case(17, spec, "bias")
        yield _route_case(17, spec, "table")
    for count, jitter in ((17, 0.3), (5, 0.01), (33, 10.0)):
        yield _route_case(count, RouteSpec(4, "sparsemixer", jitter=jitter))
    yield _route_ties(RouteSpec(3))
    yield _route_ties(RouteSpec(3, "sparsemixer", jitter=0.2))
    yield _route_ties(RouteSpec(3, "sigmoid", 4, 2, "best_two"))
    yield _route_ties(RouteSpec(5, groups=6, groups_kept=3, renormalise=True))


_ROUTE_WIDTH = 24


def _route_case(count: int, spec: RouteSpec, *vectors: str) -> Case:
    def build(builder: Builder) -> None:
        builder.linear("router", count, _ROUTE_WIDTH)
        _route_experts(builder, count)
        if "table" in vectors:
            builder.vector("table", builder.vocab_size * spec.chosen)
            table = builder.arrays["table.weight"]
            table[:] = builder.random.integers(0, count, table.shape)
        for name in {*vectors} - {
            "table"
        }:  # scores are probabilities: a bias is as large as they are
            builder.vector(name, count, centre=0.0 if name == "bias" else 1.0)

    groups = f", {spec.groups_kept} of {spec.groups} groups" if spec.groups > 1 else ""
    return Case.between(
        f"{spec.score}, {spec.chosen} of {count}{groups}{''.join(f', {v}' for v in vectors)}",
        _ROUTE_WIDTH,
        lambda ops, w, x: _route_routed(ops, w, x, spec),
        build,
    )


def _route_ties(spec: RouteSpec) -> Case:
    """Logits are small whole numbers, in any order of the sum: most experts have rivals."""

    def build(builder: Builder) -> None:
        builder.embedding("embed", _ROUTE_WIDTH).linear("router", 12, _ROUTE_WIDTH)
        _route_experts(builder, 12)
        builder.linear("head", builder.vocab_size, _ROUTE_WIDTH)
        few = builder.random.integers(-1, 2, (12, 2))
        builder.arrays["router.0.weight"][:] = np.pad(few, ((0, 0), (0, _ROUTE_WIDTH - 2)))
        table = builder.arrays["embed.weight"]
        table[:] = builder.random.integers(-1, 2, table.shape)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = _route_routed(ops, w, ops.embedding(step.tokens, w["embed"]), spec)
        return ops.logits(x, step.logit_rows, w["head"])

    return Case(f"ties, {spec.score}, {spec.groups} groups", build, body)


def _route_experts(builder: Builder, count: int) -> None:
    builder.stack("gate_up", count, (4, 4), _ROUTE_WIDTH).stack("down", count, (_ROUTE_WIDTH,), 4)


def _route_routed(ops: Ops, w: Weights, x: Value, spec: RouteSpec) -> Value:
    """The logits depend on the chosen experts, in proportion to their weights."""
    logits = ops.linear(x, w["router"])
    vectors = {name: w.get(name) for name in ("bias", "factor", "table")}
    ids, weights = ops.route(logits, spec, **vectors)
    return ops.experts(x, ids, weights, w["gate_up"], w["down"], ExpertsSpec())
