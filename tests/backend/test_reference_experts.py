"""`route` and `experts` of the oracle against loops over tokens that follow their contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.ops.experts import ExpertsSpec, experts
from vllmx_core.ops.route import RouteSpec, route

RANDOM = np.random.default_rng(3)
SPECS = [
    RouteSpec(2),
    RouteSpec(3, renormalise=True, eps=0.5, scale=1.5),
    RouteSpec(4, "sigmoid", 4, 2, "best_two", True, 1e-20, 2.5),
    RouteSpec(3, "softmax", 6, 2, "max", scale=16.0),
]


def by_hand(logits: Any, spec: RouteSpec, bias: Any, factor: Any) -> tuple[list[int], list[float]]:
    """One token."""
    exp = np.exp(logits)
    scores = exp / exp.sum() if spec.score == "softmax" else exp / (1 + exp)
    count = len(scores)
    choice = {expert: scores[expert] + bias[expert] for expert in range(count)}
    size = count // spec.groups

    def worth(group: int) -> float:
        inside = sorted((choice[group * size + i] for i in range(size)), reverse=True)
        return inside[0] if spec.group_score == "max" else sum(inside[:2])

    best = sorted(range(spec.groups), key=lambda g: (-worth(g), g))[: spec.groups_kept]
    allowed = [expert for expert in choice if expert // size in best]
    ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: spec.chosen]
    total = sum(scores[i] for i in ids) + spec.eps if spec.renormalise else 1.0
    return ids, [scores[i] / total * spec.scale * factor[i] for i in ids]


@pytest.mark.parametrize("spec", SPECS)
def test_route(spec: RouteSpec) -> None:
    logits = RANDOM.standard_normal((40, 12))
    logits[20:] = np.round(logits[20:])  # ties
    bias, factor = np.round(RANDOM.standard_normal(12), 1), RANDOM.uniform(0.5, 2, 12)
    for bias_used, factor_used in ((None, None), (bias, None), (bias, factor)):
        ids, weights = route(logits, spec, bias_used, factor_used)
        assert ids.dtype == np.int32
        for token in range(40):
            zeros, ones = np.zeros(12), np.ones(12)
            expected = by_hand(
                logits[token],
                spec,
                zeros if bias_used is None else bias,
                ones if factor_used is None else factor,
            )
            assert ids[token].tolist() == expected[0], token
            np.testing.assert_allclose(weights[token], expected[1], rtol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_is_broken_alone(spec: RouteSpec, broken: float) -> None:
    logits = RANDOM.standard_normal((3, 12))
    whole = route(logits, spec)
    logits[1, 7] = broken
    ids, weights = route(logits, spec)
    assert ((ids >= 0) & (ids < 12)).all()
    infinite = broken == np.inf and spec.score == "sigmoid"  # a sigmoid of 1: no harm
    assert np.isnan(weights[1]).all() != infinite
    for row in (0, 2):
        np.testing.assert_array_equal(ids[row], whole[0][row])
        np.testing.assert_array_equal(weights[row], whole[1][row])


@pytest.mark.parametrize(
    "spec",
    [ExpertsSpec(), ExpertsSpec("relu", gated=False), ExpertsSpec(clamp=0.7, alpha=1.702)],
)
def test_experts(spec: ExpertsSpec) -> None:
    x, weights = RANDOM.standard_normal((9, 6)), RANDOM.uniform(0, 1, (9, 3))
    ids = np.stack([RANDOM.permutation(5)[:3] for _ in range(9)]).astype(np.int32)
    rows = 8 if spec.gated else 4
    gate_up, down = RANDOM.standard_normal((5, rows, 6)), RANDOM.standard_normal((5, 6, 4))
    biases = RANDOM.standard_normal((5, rows)), RANDOM.standard_normal((5, 6))

    def one(token: int, expert: int) -> Any:
        h = gate_up[expert] @ x[token] + biases[0][expert]
        if not spec.gated:
            middle = np.maximum(h, 0)
        elif spec.clamp is None:
            middle = h[:4] / (1 + np.exp(-h[:4])) * h[4:]
        else:
            gate, up = np.minimum(h[:4], spec.clamp), np.clip(h[4:], -spec.clamp, spec.clamp)
            middle = gate / (1 + np.exp(-spec.alpha * gate)) * (up + 1)
        return down[expert] @ middle + biases[1][expert]

    expected = [sum(weights[t, j] * one(t, ids[t, j]) for j in range(3)) for t in range(9)]
    got = experts(x, ids, weights, gate_up, down, spec, *biases)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
