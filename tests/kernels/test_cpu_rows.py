"""Norms and element-wise functions of the CPU backend against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import erfc
from typing import Literal

import numpy as np
import pytest
from vllmx_core.ops.clip import clip
from vllmx_core.ops.gate import KINDS, GateKind, gate
from vllmx_core.ops.head_norm import HeadNormSpec, head_norm
from vllmx_core.ops.match_rms import FLOOR, match_rms
from vllmx_core.ops.resize import resize
from vllmx_core.ops.scale_at import scale_at
from vllmx_core.ops.scale_by import scale_by
from vllmx_core.ops.sparsify import sparsify
from vllmx_core.plan import F32, AnyArray
from vllmx_core.reference import formulas as reference
from vllmx_cpu.lowering.rows import (
    VxClip,
    VxGate,
    VxHeadNorm,
    VxMagnitude,
    VxResize,
    VxScaleAt,
    VxScaleBy,
    VxSpread,
)
from vllmx_cpu.native import Isa
from vllmx_cpu.structs import ACTIVATIONS, GATES, VxElementwise, VxNorm, VxStep

RunOp = Callable[[Isa, str, ctypes.Structure, VxStep, int], None]
WIDTHS = [1, 7, 16, 33, 1024]
ROWS = 9


def values(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(isa: Isa, run_op: RunOp, width: int, residual: bool) -> None:
    x, other, weight = values(ROWS, width), values(ROWS, width, seed=1), values(width, seed=2)
    y, total = np.empty_like(x), np.empty_like(x)
    arguments = VxNorm(
        x=x.ctypes.data, weight=weight.ctypes.data, y=y.ctypes.data, width=width, eps=1e-5
    )
    if residual:
        arguments.residual, arguments.sum = other.ctypes.data, total.ctypes.data
    run_op(isa, "rms_norm", arguments, VxStep(T=ROWS), 2)
    wide = x.astype(np.float64) + (other if residual else 0)
    np.testing.assert_allclose(y, reference.rms_norm(wide, weight, 1e-5), rtol=2e-6, atol=1e-6)
    if residual:
        np.testing.assert_array_equal(total, x + other)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(isa: Isa, run_op: RunOp, width: int, biased: bool) -> None:
    x, weight, bias = values(ROWS, width) + 3, values(width, seed=1), values(width, seed=2)
    y = np.empty_like(x)
    arguments = VxNorm(
        x=x.ctypes.data,
        weight=weight.ctypes.data,
        y=y.ctypes.data,
        width=width,
        eps=1e-5,
        bias=bias.ctypes.data if biased else None,
    )
    run_op(isa, "layer_norm", arguments, VxStep(T=ROWS), 2)
    wanted = reference.layer_norm(x.astype(np.float64), weight, bias if biased else None, 1e-5)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def silu(x: AnyArray) -> AnyArray:
    y: AnyArray = x / (1 + np.exp(-x))
    return y


def gelu(x: AnyArray) -> AnyArray:
    """The function by the tail for negative x: 1 + erf would cancel."""
    return np.array([v * 0.5 * erfc(-v / 2**0.5) for v in x])


def gelu_tanh(x: AnyArray) -> AnyArray:
    inner = (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)
    y: AnyArray = x / (1 + np.exp(-2 * inner))
    return y


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_right_to_a_millionth(isa: Isa, run_op: RunOp, kind: str) -> None:
    formula = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[kind]
    # Below about -3 float32 itself limits the exponent of the tails.
    near = np.linspace(-3, 9, 5003).astype(np.float32)
    far = np.linspace(-12, 30, 1009).astype(np.float32)
    for x, limit in ((near, 1e-6), (far, 2e-5)):
        y = np.empty_like(x)
        arguments = VxElementwise(
            x=x.ctypes.data, y=y.ctypes.data, width=len(x), activation=ACTIVATIONS[kind]
        )
        run_op(isa, "activation", arguments, VxStep(T=1), 1)
        np.testing.assert_allclose(y, formula(x.astype(np.float64)), rtol=limit, atol=1e-30)


@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activations_at_the_ends(isa: Isa, run_op: RunOp, kind: str) -> None:
    x = np.array([np.nan, 1e4, -1e4, 0.0, np.inf], np.float32)
    y = np.empty_like(x)
    arguments = VxElementwise(
        x=x.ctypes.data, y=y.ctypes.data, width=len(x), activation=ACTIVATIONS[kind]
    )
    run_op(isa, "activation", arguments, VxStep(T=1), 1)
    assert np.isnan(y[0])
    np.testing.assert_array_equal(y[1:], [1e4, 0, 0, np.inf])


# (features, features that share a factor)
SPANS = [(1, 1), (7, 1), (1024, 1), (1050, 1), (96, 32), (84, 7), (33, 33), (340, 17), (64, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "span"), SPANS)
def test_gate(isa: Isa, run_op: RunOp, kind: GateKind, width: int, span: int) -> None:
    x, g = values(ROWS, width), 4 * values(ROWS, width // span, seed=1)
    y = np.empty_like(x)
    arguments = VxGate(x.ctypes.data, g.ctypes.data, y.ctypes.data, width, span, GATES[kind])
    run_op(isa, "gate", arguments, VxStep(T=ROWS), 2)
    wanted = gate(x.astype(np.float64), g.astype(np.float64), kind)
    np.testing.assert_allclose(y, wanted, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_at_the_ends(isa: Isa, run_op: RunOp, kind: GateKind) -> None:
    g = np.array([np.nan, 1e3, -1e3, 0.0], np.float32)
    x, y = np.full_like(g, 2), np.empty_like(g)
    arguments = VxGate(x.ctypes.data, g.ctypes.data, y.ctypes.data, len(x), 1, GATES[kind])
    run_op(isa, "gate", arguments, VxStep(T=1), 1)
    assert np.isnan(y[0])
    np.testing.assert_array_equal(y[1:], 2 * reference.activation(g[1:], kind))


@pytest.mark.parametrize(("width", "span"), SPANS)
def test_scale_by(isa: Isa, run_op: RunOp, width: int, span: int) -> None:
    x, w = values(ROWS, width), values(width // span, seed=1)
    y = np.empty_like(x)
    arguments = VxScaleBy(x.ctypes.data, w.ctypes.data, y.ctypes.data, width, span)
    run_op(isa, "scale_by", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y, scale_by(x, w))


@pytest.mark.parametrize(
    ("size", "resized", "kept"), [(8, 12, 16), (8, 5, 0), (3, 10, 3), (33, 33, 1), (16, 40, 16)]
)
def test_resize(isa: Isa, run_op: RunOp, size: int, resized: int, kept: int) -> None:
    x = values(ROWS, kept + 3 * size)
    y = np.full((ROWS, kept + 3 * resized), np.nan, np.float32)
    arguments = VxResize(x.ctypes.data, y.ctypes.data, kept, size, resized, 3)
    run_op(isa, "resize", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y, resize(x, kept, size, resized))


@pytest.mark.parametrize("width", [1, 33, 130])
def test_match_rms(isa: Isa, run_op: RunOp, width: int) -> None:
    x, other = values(ROWS, width), values(ROWS, width, seed=1)
    x[0] *= 1e-4  # below the floor
    y = np.empty_like(x)
    arguments = VxMagnitude(x.ctypes.data, other.ctypes.data, y.ctypes.data, width, FLOOR)
    run_op(isa, "match_rms", arguments, VxStep(T=ROWS), 2)
    wanted = match_rms(x.astype(np.float64), other.astype(np.float64))
    np.testing.assert_allclose(y, wanted, rtol=3e-6)
    assert np.abs(wanted[0]).max() < 0.1 < np.abs(wanted[1]).max()


@pytest.mark.parametrize(("width", "deviations"), [(1, 0.5), (33, 1.6), (130, -0.3)])
def test_sparsify(isa: Isa, run_op: RunOp, width: int, deviations: float) -> None:
    x = values(ROWS, width) + np.float32(3)
    y = np.empty_like(x)
    arguments = VxMagnitude(x.ctypes.data, None, y.ctypes.data, width, deviations)
    run_op(isa, "sparsify", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_allclose(y, sparsify(x.astype(np.float64), deviations), atol=3e-6)


@pytest.mark.parametrize(("width", "some"), [(33, 33), (130, 48), (37, 20)])
def test_scale_at(isa: Isa, run_op: RunOp, width: int, some: int) -> None:
    x, table = values(ROWS, width), values(40, seed=1)
    y, positions = np.empty_like(x), np.arange(ROWS, dtype=np.int32)[::-1].copy() % 40
    arguments = VxScaleAt(x.ctypes.data, table.ctypes.data, y.ctypes.data, width, some)
    run_op(isa, "scale_at", arguments, VxStep(T=ROWS, positions=positions.ctypes.data), 2)
    np.testing.assert_array_equal(y, scale_at(x, table[positions], some))


@pytest.mark.parametrize("width", WIDTHS)
def test_clip(isa: Isa, run_op: RunOp, width: int) -> None:
    """The features around its own are left alone, and NaN is no number to hold."""
    x, bounds = values(ROWS, width), np.array([-0.4, 0.9], np.float32)
    x[0, 0] = np.nan
    y = np.full((ROWS, width + 3), 7, np.float32)
    arguments = VxClip(x.ctypes.data, bounds.ctypes.data, y[:, 2:].ctypes.data, width, width + 3)
    run_op(isa, "clip", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y[:, 2:-1], clip(x, bounds))
    assert (y[:, [0, 1, -1]] == 7).all()


@pytest.mark.parametrize("size", [4, 20, 64])
@pytest.mark.parametrize(("kind", "across"), [("rms", True), ("rms", False), ("layer", False)])
def test_head_norm(
    isa: Isa, run_op: RunOp, kind: Literal["rms", "layer"], across: bool, size: int
) -> None:
    spec = HeadNormSpec(3, 2, size, 1e-5, kind, across, values=kind == "layer")
    x, q, k = values(ROWS, spec.width) + 2, values(3 * size, seed=1), values(2 * size, seed=2)
    y = np.empty_like(x)
    arguments = VxHeadNorm(
        x.ctypes.data, q.ctypes.data, k.ctypes.data, y.ctypes.data, 3, 2, size, int(across),
        int(kind == "layer"), int(spec.values), 1e-5,
    )  # fmt: skip
    run_op(isa, "head_norm", arguments, VxStep(T=ROWS), 2)
    wanted = head_norm(x.astype(np.float64), spec, q, k)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    arguments.q_norm = None
    run_op(isa, "head_norm", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y[:, : 3 * size], x[:, : 3 * size])


@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_scale(isa: Isa, run_op: RunOp, width: int) -> None:
    x, other = values(ROWS, width), values(ROWS, width, seed=1)
    y = np.empty_like(x)
    arguments = VxElementwise(
        x=x.ctypes.data, other=other.ctypes.data, y=y.ctypes.data, width=width, factor=-0.75
    )
    run_op(isa, "add", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y, x + other)
    run_op(isa, "scale", arguments, VxStep(T=ROWS), 2)
    np.testing.assert_array_equal(y, x * np.float32(-0.75))


@pytest.mark.parametrize(("reduced", "whole"), [(1, 1), (3, 40), (40, 40), (900, 9001)])
def test_spread(isa: Isa, run_op: RunOp, reduced: int, whole: int) -> None:
    """Logits of some ids in the places of all; NaN and infinities stay."""
    random = np.random.default_rng(whole)
    places = np.sort(random.permutation(whole)[:reduced])
    sources = np.full(whole, -1, np.float32)
    sources[places] = random.permutation(reduced)
    x, y = values(ROWS, reduced), np.zeros((ROWS, whole), np.float32)
    x[0, 0], x[1, -1] = np.nan, np.inf
    arguments = VxSpread(x.ctypes.data, sources.ctypes.data, y.ctypes.data, reduced, whole)
    run_op(isa, "spread", arguments, VxStep(L=ROWS), 2)
    wanted = np.full((ROWS, whole), -np.inf, np.float32)
    wanted[:, places] = x[:, sources[places].astype(int)]
    np.testing.assert_array_equal(y, wanted)
