"""`route` on every instruction set: the order of choice, and rows that hold NaN."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.ops.route import SCORES, RouteSpec, route
from vllmx_core.plan import F32, I32
from vllmx_cpu.native import Isa
from vllmx_cpu.structs import VxRoute, VxStep

from .quantised import RunOp, inputs

SPECS = [
    (1, RouteSpec(1)),
    (5, RouteSpec(5)),
    (16, RouteSpec(4, renormalise=True)),
    (33, RouteSpec(6, "sigmoid", renormalise=True, eps=1e-20, scale=2.5)),
    (48, RouteSpec(7, groups=6, groups_kept=2)),
    (259, RouteSpec(9, scale=0.5)),
    (64, RouteSpec(8, "sigmoid", 8, 4, "best_two", True, 1e-20, 2.5)),
    (24, RouteSpec(24, groups=3, groups_kept=3)),
    (19, RouteSpec(3, "sparsemixer", jitter=0.3)),
]


def run(
    run_op: RunOp, isa: Isa, logits: F32, spec: RouteSpec, bias: F32 | None, factor: F32 | None
) -> tuple[I32, F32]:
    rows, count = logits.shape
    ids = np.full((rows + 1, spec.chosen), -7, np.int32)
    weights = np.full(ids.shape, 7.0, np.float32)
    arguments = VxRoute(
        logits=logits.ctypes.data,
        bias=None if bias is None else bias.ctypes.data,
        factor=None if factor is None else factor.ctypes.data,
        ids=ids.ctypes.data,
        weights=weights.ctypes.data,
        count=count,
        chosen=spec.chosen,
        score=SCORES.index(spec.score),
        groups=spec.groups,
        groups_kept=spec.groups_kept,
        best_two=int(spec.group_score == "best_two"),
        renormalise=int(spec.renormalise),
        eps=spec.eps,
        scale=spec.scale,
        jitter=spec.jitter,
    )
    run_op(isa, "route", arguments, VxStep(T=rows), 2)
    assert (ids[rows] == -7).all()  # nothing beyond the last row
    assert (weights[rows] == 7.0).all()
    return ids[:rows], weights[:rows]


@pytest.mark.parametrize(("count", "spec"), SPECS)
@pytest.mark.parametrize("extras", [False, True])
def test_route_is_the_formula(
    isa: Isa, run_op: RunOp, count: int, spec: RouteSpec, extras: bool
) -> None:
    logits = inputs(30, count) * 2
    bias, factor = (
        (inputs(1, count, 1)[0] * 0.3, inputs(1, count, 2)[0]) if extras else (None, None)
    )
    ids, weights = run(run_op, isa, logits, spec, bias, factor)
    wanted_ids, wanted = route(logits, spec, bias, factor)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("count", [7, 16, 40])
def test_ties_go_to_the_lower_expert(isa: Isa, run_op: RunOp, count: int, score: str) -> None:
    logits = np.random.default_rng(count).integers(-1, 2, (50, count)).astype(np.float32)
    spec = RouteSpec(6, score)  # type: ignore[arg-type]
    ids, _ = run(run_op, isa, logits, spec, None, None)
    np.testing.assert_array_equal(ids, route(logits, spec)[0])


@pytest.mark.parametrize(("count", "spec"), SPECS)
def test_a_broken_row_stays_alone(isa: Isa, run_op: RunOp, count: int, spec: RouteSpec) -> None:
    logits = inputs(9, count)
    good = run(run_op, isa, logits, spec, None, None)
    logits[2, count // 2], logits[5], logits[7] = np.nan, np.nan, -np.inf
    ids, weights = run(run_op, isa, logits, spec, None, None)
    assert ((ids >= 0) & (ids < count)).all()
    assert all(len(set(row)) == spec.chosen for row in ids.tolist())
    assert np.isnan(weights[[2, 5]]).all()
    assert np.isnan(weights[7]).all() == (spec.score != "sigmoid")
    others = [0, 1, 3, 4, 6, 8]
    np.testing.assert_array_equal(ids[others], good[0][others])
    np.testing.assert_array_equal(weights[others], good[1][others])
