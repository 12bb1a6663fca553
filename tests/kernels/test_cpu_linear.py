"""The packed linear against float64, and that a row's bits never depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import DType, bf16_to_f32, f32_to_bf16
from vllmx_cpu.native import SCRATCH_BYTES, Isa
from vllmx_cpu.packing import PackedMatrix, load_weights, matrix_shapes
from vllmx_cpu.structs import (
    ACTIVATIONS,
    NO_ACTIVATION,
    VxElementwise,
    VxEmbedding,
    VxLinear,
    VxStep,
)
from vllmx_testing.synthetic import ArraySource

RunOp = Callable[..., None]
KINDS: tuple[DType, ...] = ("f32", "f16", "bf16")
SHAPES = [(16, 8), (32, 64), (33, 17), (1, 1), (70, 130), (259, 33), (96, 512)]
MAX_ROWS = 600


@dataclass
class Case:
    """A packed matrix of random values and what they are."""

    matrix: PackedMatrix
    values: F32  # (N, K), as rounded to the kind
    bias: F32 | None
    panels: AnyArray = field(repr=False)

    def run(
        self,
        run_op: RunOp,
        isa: Isa,
        x: F32,
        *,
        threads: int = 2,
        activation: str | None = None,
        softcap: float = 0.0,
        rows: I32 | None = None,
    ) -> F32:
        count = len(x) if rows is None else len(rows)
        width = len(self.values) // (2 if activation else 1)
        y = np.full((count + 1, width), 7.0, np.float32)
        arguments = VxLinear(
            self.matrix.struct(),
            x.ctypes.data,
            y.ctypes.data,
            self.panels.ctypes.data,
            NO_ACTIVATION if activation is None else ACTIVATIONS[activation],
            int(rows is not None),
            softcap,
        )
        step = VxStep(T=len(x))
        if rows is not None:
            step.L, step.logit_rows = count, rows.ctypes.data
        run_op(isa, "linear", arguments, step, threads)
        np.testing.assert_array_equal(y[count], 7.0)  # nothing beyond the last row
        return y[:count]


def make_case(
    n: int, k: int, kind: DType, *, gated: bool = False, bias: bool = False, source: DType = "f32"
) -> Case:
    random = np.random.default_rng(n * 1000 + k)
    arrays = {"w": random.standard_normal((n, k)).astype(np.float32)}
    if bias:
        arrays["b"] = random.standard_normal(n).astype(np.float32)
    spec = WeightSpec("w", "linear", (PartSpec("w", n, "b" if bias else None),), k)
    shapes = matrix_shapes([spec], kind, {"w"} if gated else ())
    loaded = load_weights(
        [spec], {}, ArraySource(arrays, source), shapes, num_threads=2, progress=False
    )
    values = rounded(rounded(arrays["w"], source), kind)
    biases = rounded(arrays["b"], source) if bias else None
    panels = np.empty((MAX_ROWS * (k + 1),), np.float32)
    return Case(loaded.matrices["w"], values, biases, panels)


def rounded(values: F32, kind: str) -> F32:
    if kind == "bf16":
        return bf16_to_f32(f32_to_bf16(values))
    return values.astype(np.float16 if kind == "f16" else np.float32).astype(np.float32)


def inputs(rows: int, k: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def expected(case: Case, x: F32, isa: Isa) -> AnyArray:
    """The product in float64; bf16 weights round the activations where the processor multiplies
    bf16 pairs."""
    if case.matrix.shape.kind == "bf16" and isa.name in ("avx512bf16", "amx"):
        x = rounded(x, "bf16")
    product = x.astype(np.float64) @ case.values.T.astype(np.float64)
    return product if case.bias is None else product + case.bias


def assert_close(got: F32, wanted: AnyArray, k: int) -> None:
    limit = 2e-7 * np.sqrt(k) * 8 + 1e-6
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_is_the_matrix_product(isa: Isa, run_op: RunOp, kind: DType, n: int, k: int) -> None:
    for bias, gated in ((False, False), (True, False), (True, True)):
        if gated and n % 2:
            continue
        case = make_case(n, k, kind, gated=gated, bias=bias)
        for rows in (1, 3, 14):
            x = inputs(rows, k, rows)
            assert_close(case.run(run_op, isa, x), expected(case, x, isa), k)


@pytest.mark.parametrize("kind", KINDS)
def test_large_steps_pack_their_activations_together(isa: Isa, run_op: RunOp, kind: DType) -> None:
    n, k = 40, 515
    case, x = make_case(n, k, kind), inputs(MAX_ROWS, k)
    assert x.nbytes > SCRATCH_BYTES // 2
    assert_close(case.run(run_op, isa, x), expected(case, x, isa), k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(70, 130), (33, 1031)])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    isa: Isa, run_op: RunOp, kind: DType, n: int, k: int
) -> None:
    case, x = make_case(n, k, kind, bias=True), inputs(600, k)
    alone = np.concatenate([case.run(run_op, isa, x[i : i + 1], threads=1) for i in range(70)])
    random = np.random.default_rng(n)
    for rows in (*range(1, 15), *random.integers(15, 71, 8)):
        first = int(random.integers(0, 71 - rows))
        threads = int(random.choice([1, 2, 5]))
        got = case.run(run_op, isa, np.ascontiguousarray(x[first : first + rows]), threads=threads)
        np.testing.assert_array_equal(got, alone[first : first + rows], err_msg=f"{rows} rows")
    whole = case.run(run_op, isa, x)
    np.testing.assert_array_equal(whole[:70], alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("features", [16, 33, 7])
def test_a_fused_gate_gives_the_bits_of_two_ops(
    isa: Isa, run_op: RunOp, kind: DType, activation: str, features: int
) -> None:
    case, x = make_case(2 * features, 48, kind, gated=True, bias=True), inputs(5, 48)
    gate_up = case.run(run_op, isa, x)
    apart = np.empty((5, features), np.float32)
    arguments = VxElementwise(
        x=gate_up.ctypes.data,
        y=apart.ctypes.data,
        width=features,
        activation=ACTIVATIONS[activation],
    )
    run_op(isa, "gated_act", arguments, VxStep(T=5), 2)
    np.testing.assert_array_equal(case.run(run_op, isa, x, activation=activation), apart)


def test_a_gated_layout_holds_the_same_matrix(isa: Isa, run_op: RunOp) -> None:
    x = inputs(6, 20)
    plain, gated = (
        make_case(46, 20, "f32", bias=True),
        make_case(46, 20, "f32", gated=True, bias=True),
    )
    np.testing.assert_array_equal(plain.run(run_op, isa, x), gated.run(run_op, isa, x))


def test_logit_rows_and_softcap(isa: Isa, run_op: RunOp) -> None:
    case, x = make_case(70, 24, "f32"), inputs(9, 24)
    rows = np.array([0, 3, 8], np.int32)
    plain = case.run(run_op, isa, x)
    np.testing.assert_array_equal(case.run(run_op, isa, x, rows=rows), plain[rows])
    capped = case.run(run_op, isa, x, rows=rows, softcap=2.5)
    wanted = 2.5 * np.tanh(plain[rows].astype(np.float64) / 2.5)
    np.testing.assert_allclose(capped, wanted, rtol=1e-6, atol=1e-6)
    assert case.run(run_op, isa, x, rows=rows[:0]).shape == (0, 70)


def test_a_broken_row_stays_alone(isa: Isa, run_op: RunOp) -> None:
    for kind in KINDS:
        case, x = make_case(40, 24, kind), inputs(8, 24)
        good = case.run(run_op, isa, x)
        x[3, 5] = np.nan
        x[4, 6] = np.inf
        bad = case.run(run_op, isa, x)
        assert np.isnan(bad[3]).all()
        assert not np.isfinite(bad[4]).any()
        others = [0, 1, 2, 5, 6, 7]
        np.testing.assert_array_equal(bad[others], good[others])


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(33, 17), (64, 32)])
def test_embedding_reads_rows_out_of_the_packed_table(
    isa: Isa, run_op: RunOp, kind: DType, source: DType, n: int, k: int
) -> None:
    case = make_case(n, k, kind, source=source)
    ids = np.array([0, n - 1, 16, 1, 15, n], np.int32)
    y = np.zeros((len(ids), k), np.float32)
    step = VxStep(T=len(ids), tokens=ids.ctypes.data)
    run_op(isa, "embedding", VxEmbedding(case.matrix.struct(), y.ctypes.data), step, 2)
    np.testing.assert_array_equal(y[:5], case.values[ids[:5]])
    assert np.isnan(y[5]).all()  # an id beyond the table reads nobody's memory
