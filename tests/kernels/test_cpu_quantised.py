"""Matrices in GGUF's block types: the integers of a plain statement of the arithmetic, on every
instruction set, and a row's bits never depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_cpu.kinds import segments
from vllmx_cpu.native import Isa
from vllmx_cpu.packing import matrix_shapes
from vllmx_cpu.structs import BLOCK_KINDS
from vllmx_models.formats.gguf.blocks import TENSOR_TYPES, TensorType, weight_part
from vllmx_models.formats.gguf.k_blocks import _scales_and_minima
from vllmx_models.formats.gguf.legacy_blocks import half, planes
from vllmx_models.quantization.float4 import fp4_part

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

Blocks = npt.NDArray[np.uint8]
TYPES = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.name in BLOCK_KINDS}
HALVES = {
    "Q4_0": (0,), "Q8_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip


def random_part(name: str, kind: TensorType, n: int, k: int, seed: int = 0) -> WeightPart:
    """Every code and every scale of the type occurs."""
    random = np.random.default_rng([n, k, seed])
    blocks = random.integers(0, 256, (n * k // kind.values, kind.num_bytes)).astype(np.uint8)
    for at in HALVES[kind.name]:
        scale = (random.uniform(0.5, 2, len(blocks)) / 100).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        blocks[:, 0] = random.integers(118, 123, len(blocks))
    return weight_part(name, kind, (n, k), blocks.reshape(-1))


def make_case(kind: str, n: int, k: int, *, gated: bool = False) -> Case:
    case = pack_case(random_part("w", TYPES[kind], n, k), gated=gated)
    assert case.kind == kind
    return case


def stated(case: Case, x: F32, fused: bool) -> F32:
    """The kernels' arithmetic: integer sums of a unit, then float32 in the units' order."""
    kind, (n, k) = TYPES[case.kind], case.part.shape
    blocks = case.part.buffers["weight"].data.reshape(-1, kind.num_bytes)
    unit = kind.values
    q, scale = rounded(x, unit)
    terms = _terms(case.kind, blocks, (n, k // unit), q, scale)
    total = np.zeros((len(x), n), np.float32)
    for u in range(k // unit):
        for a, b in terms:
            total = fma(a[:, :, u], b[:, :, u], total, fused)
    return total + case.bias


def _terms(
    kind: str, blocks: Blocks, shape: tuple[int, int], q: npt.NDArray[np.int64], scale: F32
) -> list[tuple[F32, F32]]:
    """Pairs of factors (T, N, units), whose products are added to the sum one after the other."""
    codes = CODES[kind](blocks)
    grid = scale[:, None]  # (T, 1, units)
    if TYPES[kind].values == 32:
        dots = _sums(codes, shape, 1, q)[..., 0].astype(np.float32)
        if kind == "MXFP4":
            d = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128).reshape(shape)
        else:
            d = half(blocks, 0).reshape(shape)
        terms = [(d * grid, dots)]
        if kind in ("Q4_1", "Q5_1"):
            total = scale * q.sum(axis=2).astype(np.float32)
            low = np.broadcast_to(half(blocks, 2).reshape(shape), dots.shape)
            terms.append((low, np.broadcast_to(total[:, None], dots.shape)))
        return terms
    scales, minima = GROUPS[kind](blocks)
    groups = scales.shape[1]
    scales = scales.astype(np.int64).reshape(*shape, groups)
    total = (_sums(codes, shape, groups, q) * scales).sum(axis=3).astype(np.float32)
    d = half(blocks, HALVES[kind][0]).reshape(shape)
    if minima is None:
        return [(d * grid, total)]
    minima = minima.astype(np.int64).reshape(*shape, groups)
    low = (_sums(np.ones_like(codes), shape, groups, q) * minima).sum(axis=3).astype(np.float32)
    value = d * total - half(blocks, HALVES[kind][1]).reshape(shape) * low
    return [(np.broadcast_to(grid, value.shape), value)]


def _sums(
    codes: AnyArray, shape: tuple[int, int], groups: int, q: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """(T, N, units, groups) exact dot products."""
    cut = codes.astype(np.int64).reshape(*shape, groups, -1)
    grouped = q.reshape(*q.shape[:2], groups, -1)
    found: npt.NDArray[np.int64] = np.einsum("tugk,nugk->tnug", grouped, cut)
    return found


def _nibbles(blocks: Blocks, at: int) -> npt.NDArray[np.int64]:
    return planes(blocks[:, at : at + 16], 16, 4).astype(np.int64)


def _fifth(blocks: Blocks, at: int) -> npt.NDArray[np.int64]:
    bits = blocks[:, at : at + 4].copy().view("<u4") >> np.arange(32, dtype=np.uint32) & 1
    return bits.astype(np.int64) << 4


def _wide(low: Blocks, high: Blocks, place: int) -> npt.NDArray[np.int64]:
    return low.astype(np.int64) | high.astype(np.int64) << place


E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
CODES: dict[str, Callable[[Blocks], AnyArray]] = {  # less a constant zero
    "Q8_0": lambda b: b[:, 2:].view(np.int8),
    "Q4_0": lambda b: _nibbles(b, 2) - 8,
    "Q4_1": lambda b: _nibbles(b, 4),
    "Q5_0": lambda b: (_nibbles(b, 6) | _fifth(b, 2)) - 16,
    "Q5_1": lambda b: _nibbles(b, 8) | _fifth(b, 4),
    "IQ4_NL": lambda b: IQ4[_nibbles(b, 2)],
    "MXFP4": lambda b: E2M1_DOUBLED[_nibbles(b, 1)],
    "Q2_K": lambda b: planes(b[:, 16:80], 32, 2),
    "Q3_K": lambda b: _wide(planes(b[:, 32:96], 32, 2), planes(b[:, :32], 32, 1), 2) - 4,
    "Q4_K": lambda b: planes(b[:, 16:], 32, 4),
    "Q5_K": lambda b: _wide(planes(b[:, 48:], 32, 4), planes(b[:, 16:48], 32, 1), 4),
    "Q6_K": lambda b: _wide(planes(b[:, :128], 64, 4), planes(b[:, 128:192], 32, 2), 4) - 32,
    "IQ4_XS": lambda b: IQ4[planes(b[:, 8:], 16, 4)],
}


def _q3_k_scales(blocks: Blocks) -> AnyArray:
    packed = blocks[:, 96:108]
    return _wide(planes(packed[:, :8], 8, 4), planes(packed[:, 8:], 4, 2), 4) - 32


def _iq4_xs_scales(blocks: Blocks) -> AnyArray:
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    high = blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return _wide(low.reshape(-1, 8), high.reshape(-1, 8), 4) - 32


Groups = Callable[[Blocks], tuple[AnyArray, AnyArray | None]]
GROUPS: dict[str, Groups] = {  # integer scales and minima
    "Q2_K": lambda b: (b[:, :16] & 15, b[:, :16] >> 4),
    "Q3_K": lambda b: (_q3_k_scales(b), None),
    "Q4_K": lambda b: _scales_and_minima(b[:, 4:16]),
    "Q5_K": lambda b: _scales_and_minima(b[:, 4:16]),
    "Q6_K": lambda b: (b[:, 192:208].view(np.int8), None),
    "IQ4_XS": lambda b: (_iq4_xs_scales(b), None),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), [(32, 256), (33, 512), (70, 1280), (1, 256)])
def test_the_arithmetic_is_the_stated_one(
    isa: Isa, run_op: RunOp, kind: str, n: int, k: int
) -> None:
    case = make_case(kind, n, k)
    for rows in (1, 3, 14):
        x = inputs(rows, k, rows)
        x[0, : k // 2] = 0
        got, wanted = case.run(run_op, isa, x), stated(case, x, isa.name != "portable")
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", TYPES)
def test_the_largest_sums_fit(isa: Isa, run_op: RunOp, kind: str) -> None:
    """Codes and group scales at either end of their ranges, activations all at +127 or -127."""
    n, k = 64, 512
    part = random_part("w", TYPES[kind], n, k)
    blocks = part.buffers["weight"].data.reshape(-1, TYPES[kind].num_bytes)
    of_row = np.repeat(np.array([0x00, 0xFF, 0x7F, 0x80], np.uint8), len(blocks) // 4)
    halves = [at + i for at in HALVES[kind] for i in (0, 1)] or [0]
    for at in set(range(TYPES[kind].num_bytes)) - set(halves):
        blocks[:, at] = of_row
    case = pack_case(part)
    for rows in (1, 4, 13):
        x = np.ones((rows, k), np.float32)
        x[::2] = -1
        np.testing.assert_array_equal(
            case.run(run_op, isa, x), stated(case, x, isa.name != "portable")
        )


@pytest.mark.parametrize("kind", [name for name, kind in TYPES.items() if kind.values == 32])
@pytest.mark.parametrize("k", [32, 96, 416])
def test_widths_of_single_blocks(isa: Isa, run_op: RunOp, kind: str, k: int) -> None:
    case, x = make_case(kind, 40, k), inputs(5, k)
    wanted = stated(case, x, isa.name != "portable")
    np.testing.assert_array_equal(case.run(run_op, isa, x), wanted)


@pytest.mark.parametrize("kind", TYPES)
def test_only_the_rounding_of_activations_is_lost(isa: Isa, run_op: RunOp, kind: str) -> None:
    case, x = make_case(kind, 96, 2048), inputs(20, 2048)
    exact = x.astype(np.float64) @ case.part.dequantize().T.astype(np.float64) + case.bias
    error = np.linalg.norm(case.run(run_op, isa, x) - exact) / np.linalg.norm(exact)
    assert error < (0.009 if TYPES[kind].values == 256 else 0.007)


@pytest.mark.parametrize("kind", TYPES)
def test_bits_of_a_row_do_not_depend_on_the_batch(isa: Isa, run_op: RunOp, kind: str) -> None:
    check_batches(make_case(kind, 70, 1280), run_op, isa)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4", "Q4_K", "Q6_K"])
def test_prompts_wider_than_a_cache(isa: Isa, run_op: RunOp, kind: str) -> None:
    """The rows of such a prompt pass by the weights in turns."""
    case, x = make_case(kind, 40, 8192), inputs(300, 8192)
    got = case.run(run_op, isa, x)
    for row in (0, 1, 95, 96, 97, 191, 192, 287, 299):
        alone = case.run(run_op, isa, x[row : row + 1])
        np.testing.assert_array_equal(got[row : row + 1], alone, err_msg=f"row {row}")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("features", [16, 33])
def test_a_fused_gate_gives_the_bits_of_two_ops(
    isa: Isa, run_op: RunOp, kind: str, features: int
) -> None:
    check_gate(random_part("w", TYPES[kind], 2 * features, 512), run_op, isa)


@pytest.mark.parametrize("kind", TYPES)
def test_logit_rows_and_broken_rows(isa: Isa, run_op: RunOp, kind: str) -> None:
    case, x = make_case(kind, 40, 512), inputs(9, 512)
    rows = np.array([0, 3, 8], np.int32)
    good = case.run(run_op, isa, x)
    np.testing.assert_array_equal(case.run(run_op, isa, x, rows=rows), good[rows])
    x[3, 5], x[4, 300] = np.nan, np.inf
    bad = case.run(run_op, isa, x)
    assert not np.isfinite(bad[3:5]).any()
    others = [0, 1, 2, 5, 6, 7, 8]
    np.testing.assert_array_equal(bad[others], good[others])


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_reads_rows_out_of_the_packed_table(isa: Isa, run_op: RunOp, kind: str) -> None:
    part = random_part("w", TYPES[kind], 50, 512)
    ids = np.array([0, 49, 16, 1, 15, 50], np.int32)
    y = embedding_rows(part, run_op, isa, ids)
    np.testing.assert_array_equal(y[:5], part.dequantize()[ids[:5]])
    assert np.isnan(y[5]).all()


@pytest.mark.parametrize("file", ["gguf", "safetensors"])
def test_every_exponent_of_mxfp4(isa: Isa, run_op: RunOp, file: str) -> None:
    """Two scales are subnormal, the largest values of the last one are infinite."""
    random = np.random.default_rng(0)
    exponents = np.stack([np.arange(256), np.arange(256)[::-1]], axis=1).astype(np.uint8)
    codes = random.integers(0, 256, (256, 2, 16), np.uint8)
    if file == "gguf":
        blocks = np.concatenate([exponents[..., None], codes], axis=2)
        part = weight_part("w", TYPES["MXFP4"], (256, 64), blocks.reshape(-1))
    else:
        raw = [RawTensor("w", "u8", each.shape, each.reshape(-1)) for each in (codes, exponents)]
        part = fp4_part("w", *raw, (256, 64))
    y = embedding_rows(part, run_op, isa, np.arange(256, dtype=np.int32))
    np.testing.assert_array_equal(y, part.dequantize())


def test_what_stays_quantised() -> None:
    parts = {
        name: random_part(name, TYPES[kind], 32, 256)
        for name, kind in (("q", "Q4_K"), ("k", "Q4_K"), ("v", "Q6_K"))
    }
    source = Source(parts | {"dense": dense_part("dense", np.ones((32, 256), np.float32))})

    def kind(*names: str, offset: float = 0.0) -> str:
        spec = WeightSpec("w", "linear", tuple(PartSpec(n, 32) for n in names), 256, offset=offset)
        return matrix_shapes([spec], "bf16", (), source)["w"].kind

    assert kind("q", "k") == "Q4_K"
    assert kind("v") == "Q6_K"
    assert kind("q", "k", "v") == "bf16"  # unless it is cut
    assert kind("dense") == kind("q", "dense") == "bf16"
    assert kind("q", offset=1.0) == "bf16"


def test_a_fused_matrix_is_cut_where_the_type_changes() -> None:
    kinds = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}
    source = Source({name: random_part(name, TYPES[kind], 32, 256) for name, kind in kinds.items()})
    fused = WeightSpec("qkv", "linear", tuple(PartSpec(name, 32) for name in kinds), 256)
    cut = segments(fused, source, ())
    assert [[part.name for part in spec.parts] for spec in cut] == [["q", "k"], ["v"]]
    assert len({spec.name for spec in cut}) == 2
    assert segments(fused, source, {"qkv"}) == (fused,)  # gate and up rows lie side by side
    assert segments(cut[0], source, ()) == (cut[0],)
