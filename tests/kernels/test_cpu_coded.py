"""Matrices of integers with a scale and a zero for groups of columns (GPTQ, AWQ, int8), and of
float8, multiplied as they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.plan import F32, I32
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_cpu.kinds import native_kind, packed_columns, segments
from vllmx_cpu.native import Isa
from vllmx_cpu.packing import COLS_OF
from vllmx_models.quantization.float8 import Fp8
from vllmx_testing.parts import IntegerLayout

from .quantised import (
    Case,
    RunOp,
    Source,
    check_batches,
    check_gate,
    dense_part,
    embedding_rows,
    fma,
    inputs,
    pack_case,
    rounded,
)

GROUPS = {  # bits, group size, columns -> kind
    (4, 32, 96): "affine4_32",
    (4, 64, 320): "affine4_64",
    (4, 128, 640): "affine4_128",
    (4, 96, 288): "affine4_32",  # three units a group
    (4, 256, 1024): "affine4_128",
    (4, None, 200): "affine4_128",  # the last unit is not full
    (2, 128, 300): "affine4_128",  # nor is the last group
    (3, 32, 40): "affine4_32",
    (8, 32, 64): "affine8_32",
    (5, 64, 192): "affine8_64",
    (8, 128, 1280): "affine8_128",
    (8, None, 511): "affine8_128",
}


def integers(
    n: int, k: int, bits: int, group: int | None, *, shuffled: bool = False, seed: int = 0
) -> WeightPart:
    """Random codes, scales and zeros of every size; input features of a group apart if shuffled."""
    random = np.random.default_rng([n, k, bits, seed])
    group_of = np.arange(k, dtype=np.int32) // (group or k)
    if shuffled:
        group_of = random.permutation(group_of)
    groups = -(-k // (group or k))
    codes = random.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scales = (random.uniform(0.5, 2, (n, groups)) / 100).astype(np.float32)
    zeros = random.integers(0, (1 << bits) + 1, (n, groups))

    def coded(rows: slice) -> CodedRows:
        return CodedRows(codes[rows], scales[rows], zeros[rows], group_of)

    layout = IntegerLayout(bits, group, {"act_order": shuffled}, coded)
    g_idx = RawTensor("g_idx", "i32", (k,), group_of.view(np.uint8))
    return StoredPart("w", (n, k), layout, {"g_idx": g_idx})


def padded(values: F32, width: int) -> F32:
    return np.pad(values, ((0, 0), (0, -values.shape[1] % width)))


def stated(case: Case, x: F32, fused: bool) -> F32:
    """The kernels' arithmetic: integer sums of a unit, then float32 in the units' order."""
    width = COLS_OF[case.kind]
    rows = case.part.coded_rows(0, case.part.shape[0])
    assert rows.group_of is not None
    assert rows.zeros is not None
    order = packed_columns(case.part, case.matrix.shape.cols)
    group_of, x = rows.group_of[order], np.where(order < 0, np.float32(0), x[:, order])
    q, scale = rounded(padded(x, width), width)
    values = rows.codes[:, order].astype(np.int64) - rows.zeros[:, group_of]
    total = np.zeros((len(x), len(values)), np.float32)
    for u in range(q.shape[1]):
        here = values[:, u * width : (u + 1) * width]
        dots = q[:, u, : here.shape[1]] @ here.T
        factor = scale[:, u, None] * rows.scales[None, :, group_of[u * width]]
        total = fma(factor, dots.astype(np.float32), total, fused)
    return total + case.bias


@pytest.mark.parametrize(("form", "kind"), GROUPS.items())
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_arithmetic_is_the_stated_one(
    isa: Isa, run_op: RunOp, form: tuple[int, int | None, int], kind: str, shuffled: bool
) -> None:
    bits, group, k = form
    for n in (1, 33, 70):
        case = pack_case(integers(n, k, bits, group, shuffled=shuffled))
        assert case.kind == kind
        for rows in (1, 3, 14):
            x = inputs(rows, k, rows)
            x[0, : k // 2] = 0
            wanted = stated(case, x, isa.name != "portable")
            np.testing.assert_array_equal(case.run(run_op, isa, x), wanted)


@pytest.mark.parametrize(("bits", "group", "k"), [(4, 48, 240), (3, 20, 100), (8, 48, 96)])
def test_groups_of_which_a_rank_has_a_part_are_filled_up(
    isa: Isa, run_op: RunOp, bits: int, group: int, k: int
) -> None:
    case = pack_case(integers(33, k, bits, group, shuffled=True))
    assert case.kind == f"affine{8 if bits == 8 else 4}_32"
    assert case.matrix.shape.cols > k
    for rows in (1, 14):
        x = inputs(rows, k, rows)
        wanted = stated(case, x, isa.name != "portable")
        np.testing.assert_array_equal(case.run(run_op, isa, x), wanted)


def float8(
    n: int, k: int, *, block: tuple[int, int] | None = None, seed: int = 0, whole: bool = False
) -> WeightPart:
    """Random float8 numbers, without NaN, with a scale for the tensor, each row or each block."""
    random = np.random.default_rng([n, k, seed])
    codes = random.integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    shape = (-(-n // block[0]), -(-k // block[1])) if block else (1, 1) if whole else (n, 1)
    return float8_part(codes, (random.uniform(0.5, 2, shape) / 500).astype(np.float32), block)


def float8_part(codes: np.ndarray, scales: F32, block: tuple[int, int] | None = None) -> WeightPart:
    n, k = codes.shape
    strategy = "block" if block else "tensor" if scales.size == 1 else "channel"
    options: dict[str, str | int | float | bool] = {"strategy": strategy, "dtype": "f8e4m3"}
    options["block_rows"], options["block_cols"] = block or (1, k)
    weight = RawTensor("w", "f8e4m3", (n, k), codes.reshape(-1))
    scale = RawTensor("s", "f32", scales.shape, scales.view(np.uint8).reshape(-1))

    layout = Fp8(8, None, options)
    return StoredPart("w", (n, k), layout, {"weight": weight, "scale": scale})


def spread(part: WeightPart) -> F32:
    """(rows, cols) scales."""
    (n, k), scale = part.shape, part.buffers["scale"].to_f32()
    if part.layout.options["strategy"] != "block":
        return np.broadcast_to(scale, (n, k))
    block = (int(part.layout.options["block_rows"]), int(part.layout.options["block_cols"]))
    return np.kron(scale, np.ones(block, np.float32))[:n, :k]


FLOAT8 = [
    float8(32, 128, whole=True),
    float8(33, 200),
    float8(1, 31),
    float8(150, 640, block=(128, 128)),
    float8(70, 1000, block=(7, 256)),
]


@pytest.mark.parametrize("part", FLOAT8, ids=lambda part: str(part.shape))
def test_float8_is_exact_but_for_the_sum(isa: Isa, run_op: RunOp, part: WeightPart) -> None:
    case = pack_case(part)
    assert case.kind == "float8"
    weights = part.buffers["weight"].to_f32().reshape(part.shape) * spread(part).astype(np.float64)
    for rows in (1, 3, 14, 40):
        x = inputs(rows, part.shape[1], rows)
        got = case.run(run_op, isa, x)
        if isa.name in ("avx512bf16", "amx"):
            x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        exact = x.astype(np.float64) @ weights.T
        allowed = 4e-6 * (np.abs(x).astype(np.float64) @ np.abs(weights).T + np.abs(case.bias))
        assert (np.abs(got - exact - case.bias) <= allowed).all()


def test_every_float8_number(isa: Isa, run_op: RunOp) -> None:
    """Subnormals, zeros of both signs, NaN; one column at a time, so that nothing is rounded."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    codes[1] = 0
    codes[1, 7], codes[2, codes[2] & 0x7F == 0x7F] = 0x7F, 0
    scales = np.exp2(np.arange(16, dtype=np.float32) - 8)[:, None]
    part = float8_part(codes, scales)
    case = pack_case(part)
    wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    got = case.run(run_op, isa, np.eye(256, dtype=np.float32)).T - case.bias[:, None]
    units = np.isnan(wanted).reshape(16, 2, 128).any(axis=2)
    broken = np.repeat(units, 128, axis=1) | np.isnan(wanted).any(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.isnan(got), broken)
    exact = wanted + case.bias[:, None] - case.bias[:, None]
    np.testing.assert_array_equal(got[2], exact[2])
    y = embedding_rows(part, run_op, isa, np.array([2, 5], np.int32))
    np.testing.assert_array_equal(y[0], wanted[2])


PARTS = {
    "4 bit": integers(70, 640, 4, 128),
    "4 bit act-order": integers(70, 256, 4, 64, shuffled=True),
    "4 bit act-order, filled up": integers(70, 240, 4, 48, shuffled=True),
    "8 bit": integers(70, 200, 8, None),
    "float8": float8(70, 384, block=(128, 128)),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_bits_of_a_row_do_not_depend_on_the_batch(
    isa: Isa, run_op: RunOp, part: WeightPart
) -> None:
    check_batches(pack_case(part), run_op, isa)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_fused_gate_gives_the_bits_of_two_ops(isa: Isa, run_op: RunOp, part: WeightPart) -> None:
    check_gate(part, run_op, isa)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_logit_rows_and_broken_rows(isa: Isa, run_op: RunOp, part: WeightPart) -> None:
    case, x = pack_case(part), inputs(9, part.shape[1])
    rows = np.array([0, 3, 8], np.int32)
    good = case.run(run_op, isa, x)
    np.testing.assert_array_equal(case.run(run_op, isa, x, rows=rows), good[rows])
    x[3, 5], x[4, 100] = np.nan, np.inf
    bad = case.run(run_op, isa, x)
    assert not np.isfinite(bad[3:5]).any()
    others = [0, 1, 2, 5, 6, 7, 8]
    np.testing.assert_array_equal(bad[others], good[others])


@pytest.mark.parametrize(
    "part", [integers(50, 200, 3, 64), integers(50, 128, 8, 32)], ids=["3 bit", "8 bit"]
)
def test_embedding_reads_rows_out_of_the_packed_table(
    isa: Isa, run_op: RunOp, part: WeightPart
) -> None:
    ids: I32 = np.array([0, 49, 16, 1, 15], np.int32)
    y = embedding_rows(part, run_op, isa, ids)
    np.testing.assert_array_equal(y, part.dequantize()[ids])


def fused(*parts: WeightPart, kind: str = "linear") -> tuple[WeightSpec, Source]:
    names = [str(index) for index in range(len(parts))]
    specs = tuple(PartSpec(n, p.shape[0]) for n, p in zip(names, parts, strict=True))
    spec = WeightSpec("w", kind, specs, parts[0].shape[1])  # type: ignore[arg-type]
    return spec, Source(dict(zip(names, parts, strict=True)))


def test_what_has_no_kernel() -> None:
    def kind(*parts: WeightPart, **options: str) -> str | None:
        return native_kind(*fused(*parts, **options))

    assert kind(integers(16, 96, 4, 16)) is None  # 16 columns are less than a unit
    assert kind(integers(16, 96, 4, 48)) is None
    assert kind(integers(16, 96, 4, 96), integers(16, 96, 8, 96)) is None
    assert kind(float8(16, 256, block=(128, 96))) is None
    assert kind(float8(16, 256), float8(16, 256, block=(128, 128))) == "float8"
    assert kind(dense_part("w", np.ones((16, 32), np.float32))) is None
    shuffled = integers(16, 128, 4, 32, shuffled=True)
    assert kind(shuffled) == "affine4_32"
    assert kind(shuffled, kind="embedding") is None
    assert kind(integers(16, 64, 4, 8, shuffled=True)) is None  # filled up it takes 22 bits


def test_parts_of_different_orders_are_multiplied_apart() -> None:
    """q and k in one order of input features, v in another."""
    q, k = (integers(rows, 128, 4, 32, shuffled=True) for rows in (16, 16))
    v = integers(8, 128, 4, 32, shuffled=True, seed=1)
    spec, source = fused(q, k, v)
    assert native_kind(spec, source) is None
    assert [len(cut.parts) for cut in segments(spec, source, ())] == [2, 1]
    assert native_kind(*fused(q, k)) == "affine4_32"
