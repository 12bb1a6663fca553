"""Paged attention on the CPU: against float64, and the same bits however a step is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.plan import AnyArray
from vllmx_core.weights.tensor import f32_to_bf16
from vllmx_cpu.native import Isa

from .cpu_attention import (
    MULTIPLIED_AS_BF16,
    Case,
    Layer,
    RunOp,
    attend,
    expected,
    random_qkv,
    relative_error,
)

FEATURES = [
    Case(head_size=128, norm=True, rotary=128, kv="bf16"),
    Case(rotary=64, norm=True),
    Case(rotary=32),
    Case(rotary=48, interleaved=True),
    Case(softcap=2.0, sinks=True),
    Case(softcap=30.0, kv="bf16"),
    Case(window=50),
    Case(window=300, sinks=True, kv="bf16"),
    Case(window=1),
    Case(causal=False),
    Case(causal=False, window=9, kv="f16"),
    Case(window=1, kv="bf16"),
    Case(window=50, softcap=5.0, kv="bf16", page=128),
    Case(causal=False, kv="bf16"),
    Case(causal=False, window=9, sinks=True, kv="bf16"),
    *(Case(heads=heads, kv_heads=2, kv="bf16") for heads in (2, 6, 14, 16, 40)),
    *(Case(head_size=size, kv="bf16", page=32) for size in (8, 16, 20, 80, 96, 112, 192, 256, 512)),
    *(Case(head_size=size) for size in (8, 16, 20, 80, 96, 112, 128, 192, 256, 512)),
    *(Case(heads=1, kv_heads=1, head_size=1024, kv=kv) for kv in MULTIPLIED_AS_BF16),
    *(
        Case(heads=heads, kv_heads=kv_heads, head_size=16, page=page, kv=kv)
        for heads, kv_heads in ((1, 1), (3, 1), (15, 5), (16, 1), (71, 1))
        for page, kv in ((64, "bf16"), (128, "f16"))
    ),
    *(
        case
        for kv in kv_quant.CODED
        for case in (
            Case(head_size=128, norm=True, rotary=128, kv=kv),
            Case(rotary=48, interleaved=True, kv=kv, page=64),
            Case(softcap=2.0, sinks=True, kv=kv),
            Case(window=50, kv=kv),
            Case(window=300, sinks=True, kv=kv),
            Case(window=1, kv=kv),
            Case(causal=False, kv=kv),
            Case(causal=False, window=9, kv=kv),
            *(
                Case(head_size=size, kv=kv, page=32)
                for size in (2, 8, 16, 20, 48, 80, 96, 112, 192, 256)
                if "q4" not in kv or size % kv_quant.TURNED_MULTIPLE == 0
            ),
            *(
                Case(heads=heads, kv_heads=kv_heads, head_size=16, kv=kv, page=128)
                for heads, kv_heads in ((1, 1), (3, 1), (15, 5), (71, 1))
            ),
        )
    ),
]


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_matches_float64(run_op: RunOp, isa: Isa, case: Case) -> None:
    length = 333
    layer, qkv = Layer(case, length, 1, seed=3), random_qkv(case, 1, length)
    got = attend(run_op, isa, layer, qkv, [(0, length, 0)], threads=2)
    # float32 pages compute in float32; bf16 rounds the probabilities to 8 bits, where codes have
    # scales even a probability of 1
    limit = 4e-3 if case.kv in kv_quant.CODED else 3e-3 if case.kv == "bf16" else 1e-6
    assert relative_error(got, expected(layer, qkv[0])) < limit


CUTS = [
    Case(head_size=32, kv="bf16", norm=True, rotary=32),
    Case(head_size=20, kv="f32", window=333),
    Case(heads=6, kv_heads=2, head_size=16, kv="bf16", page=32, window=40, sinks=True),
    Case(head_size=16, kv="f16", softcap=5.0),
    Case(heads=71, kv_heads=1, head_size=8, kv="bf16"),
    Case(heads=5, kv_heads=1, head_size=80, kv="bf16", window=99, softcap=5.0),
    Case(heads=16, kv_heads=2, head_size=112, kv="bf16"),
    Case(head_size=32, kv="int8", norm=True, rotary=32),
    Case(heads=6, kv_heads=2, head_size=20, kv="int8", page=32, window=40, sinks=True),
    Case(head_size=32, kv="fp8", norm=True, rotary=32, window=333),
    Case(heads=71, kv_heads=1, head_size=8, kv="fp8", softcap=5.0),
    Case(heads=5, kv_heads=1, head_size=80, kv="fp8", window=99, softcap=5.0),
    Case(heads=16, kv_heads=2, head_size=112, kv="int8"),
    Case(head_size=32, kv="q4", norm=True, rotary=32, window=333),
    Case(heads=5, kv_heads=1, head_size=80, kv="q4", window=99, softcap=5.0),
    Case(heads=71, kv_heads=1, head_size=16, kv="q8,q4", sinks=True),
    Case(heads=6, kv_heads=2, head_size=48, kv="q8,q4", page=32, window=40),
]


@pytest.mark.parametrize("case", CUTS, ids=str)
def test_bits_do_not_depend_on_the_cut(run_op: RunOp, isa: Isa, case: Case) -> None:
    """One prefill; chunks of 1, 7 and 100; other block numbers, threads and batch mates."""
    length = 700
    qkv = random_qkv(case, 1, length)
    layer = Layer(case, length, 1, seed=0)
    whole = attend(run_op, isa, layer, qkv, [(0, length, 0)], threads=1)
    for chunk, threads in ((7, 1), (100, 5), (1, 2)):
        layer = Layer(case, length, 1, seed=chunk)
        spans = [(i, min(i + chunk, length), 0) for i in range(0, length, chunk)]
        parts = [attend(run_op, isa, layer, qkv, [span], threads) for span in spans]
        np.testing.assert_array_equal(np.concatenate(parts), whole, strict=True)


@pytest.mark.parametrize("kv", MULTIPLIED_AS_BF16)
def test_mixed_rows_in_one_step(run_op: RunOp, isa: Isa, kv: str) -> None:
    """Decode rows, a first chunk and a chunk with context side by side, each with its own bits."""
    case = Case(head_size=32, kv=kv, rotary=32)
    lengths = (600, 37, 300, 1)
    qkv = random_qkv(case, len(lengths), 600)
    alone = []
    for which, length in enumerate(lengths):
        layer = Layer(case, 600, len(lengths), seed=which)
        alone.append(attend(run_op, isa, layer, qkv, [(0, length, which)], threads=1))
    layer = Layer(case, 600, len(lengths), seed=99)
    attend(run_op, isa, layer, qkv, [(0, 599, 0), (0, 200, 2)], threads=2)
    rows = [(599, 600, 0), (0, 37, 1), (200, 300, 2), (0, 1, 3)]
    got = attend(run_op, isa, layer, qkv, rows, threads=5)
    want = np.concatenate([alone[which][first:end] for first, end, which in rows])
    np.testing.assert_array_equal(got, want, strict=True)


DECODED = [
    Case(head_size=128, norm=True, rotary=128, kv="bf16"),
    Case(heads=6, kv_heads=2, head_size=20, kv="bf16", page=32, window=40, sinks=True),
    Case(heads=71, kv_heads=1, head_size=8, kv="bf16", softcap=5.0),
    Case(heads=16, kv_heads=8, head_size=80, kv="bf16", page=64),
    Case(head_size=16, kv="f16"),
    Case(head_size=112, kv="int8", rotary=64),
    Case(heads=3, kv_heads=3, head_size=32, kv="fp8", norm=True),
    Case(heads=6, kv_heads=3, head_size=128, kv="q4", rotary=64, norm=True),
    Case(heads=3, kv_heads=3, head_size=80, kv="q8,q4"),
]


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_a_batch_of_decode_rows_has_the_bits_of_prompts(
    run_op: RunOp, isa: Isa, case: Case
) -> None:
    """One token a row, contexts around groups, chunks and partitions in any order: every unit
    writes and reads its own row, fetching the next one's pages whatever their number."""
    lengths = np.random.default_rng(11).permutation([0, 1, 14, 15, 16, 46, 64, 150, 255, 271, 300])
    steps, longest = 3, 303
    qkv = random_qkv(case, len(lengths), longest)
    want = []
    for which, length in enumerate(lengths):
        layer = Layer(case, longest, len(lengths), seed=which)
        want.append(attend(run_op, isa, layer, qkv, [(0, length + steps, which)], threads=1))
    for threads in (1, 2, 5):
        layer = Layer(case, longest, len(lengths), seed=50 + threads)
        prompts = [(0, int(n), which) for which, n in enumerate(lengths) if n]
        attend(run_op, isa, layer, qkv, prompts, threads)
        for i in range(steps):
            rows = [(int(n) + i, int(n) + i + 1, which) for which, n in enumerate(lengths)]
            got = attend(run_op, isa, layer, qkv, rows, threads)
            expected_rows = np.stack([want[which][n] for n, _, which in rows])
            np.testing.assert_array_equal(got, expected_rows, strict=True)


@pytest.mark.parametrize("workspace", [True, False], ids=["workspace", "no workspace"])
def test_a_long_decode_row_is_shared_by_all_threads(
    run_op: RunOp, isa: Isa, workspace: bool
) -> None:
    """The bits are the same as on one thread, with and without room for the partial results."""
    case = Case(heads=3, kv_heads=1, head_size=16, kv="bf16")
    length = 3000
    qkv = random_qkv(case, 1, length)
    layer = Layer(case, length, 1, seed=5)
    whole = attend(run_op, isa, layer, qkv, [(0, length, 0)], threads=1)
    if not workspace:
        layer.workspace = layer.workspace[:0]
    got = attend(run_op, isa, layer, qkv, [(length - 1, length, 0)], threads=5)
    np.testing.assert_array_equal(got, whole[-1:], strict=True)


@pytest.mark.parametrize("out", ["bf16", "f16"])
def test_16_bit_output_is_the_rounded_one(run_op: RunOp, isa: Isa, out: str) -> None:
    case = Case(head_size=20)
    qkv = random_qkv(case, 1, 50)
    wide = attend(run_op, isa, Layer(case, 50, 1, seed=1), qkv, [(0, 50, 0)], threads=2)
    narrow = replace(case, out=out)
    got = attend(run_op, isa, Layer(narrow, 50, 1, seed=1), qkv, [(0, 50, 0)], threads=2)
    want = f32_to_bf16(wide) if out == "bf16" else wide.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kv", MULTIPLIED_AS_BF16)
def test_a_reused_page_hides_what_it_held(run_op: RunOp, isa: Isa, kv: str) -> None:
    """A sequence whose K/V is NaN leaves its pages to another, which must not see it."""
    case = Case(head_size=32, kv=kv)
    qkv = random_qkv(case, 1, 70)
    layer = Layer(case, 70, 1, seed=2)
    broken = attend(run_op, isa, layer, np.full_like(qkv, np.nan), [(0, 70, 0)], threads=2)
    assert np.isnan(broken).all()
    got = [attend(run_op, isa, layer, qkv, [(i, i + 1, 0)], threads=2) for i in range(70)]
    assert relative_error(np.concatenate(got), expected(layer, qkv[0])) < 4e-3


@pytest.mark.parametrize(
    ("kv", "head_size"),
    [("int8", 20), ("int8", 64), ("fp8", 20), ("fp8", 64), ("q4", 64), ("q4", 80), ("q8,q4", 112)],
)
def test_codes_and_scales_are_those_of_the_rule(
    run_op: RunOp, isa: Isa, kv: str, head_size: int
) -> None:
    """Bit by bit, out of the pages; every magnitude of the vectors, zero and NaN too."""
    case = Case(head_size=head_size, kv=kv, page=32)
    length = 60
    layer, qkv = Layer(case, length, 1, seed=3), random_qkv(case, 1, length)
    powers = np.random.default_rng(1).integers(-60, 60, (1, length, 1))
    qkv *= (2.0**powers).astype(np.float32)
    qkv[0, 7], qkv[0, 9, -1], qkv[0, 11] = 0, np.nan, 1e-35
    attend(run_op, isa, layer, qkv, [(0, 33, 0)], threads=2)
    attend(run_op, isa, layer, qkv, [(33, length, 0)], threads=5)
    heads = qkv[0].reshape(length, case.heads + 2 * case.kv_heads, head_size)
    keys, values = np.split(heads[:, case.heads :], 2, axis=1)
    interleaved = kv == "fp8" and isa.name.startswith("avx512")
    k_dtype, v_dtype = kv_quant.sides(kv)
    k_read = _key_nibbles(layer) if k_dtype == "q4" else _keys(layer, interleaved)
    v_read = _value_nibbles(layer) if v_dtype == "q4" else _values(layer, interleaved)
    for written, wanted, dtype in ((k_read, keys, k_dtype), (v_read, values, v_dtype)):
        codes, scales = kv_quant.quantise(wanted, dtype)
        unit = 256 if kv == "fp8" else 1
        np.testing.assert_array_equal(written[0][:length], codes.view(np.uint8))
        np.testing.assert_array_equal(written[1][:length], scales * unit)


def _key_nibbles(layer: Layer) -> tuple[AnyArray, AnyArray]:
    """As `_keys`, of codes of 4 bits, 2 c - 15 as bytes."""
    size = layer.case.head_size
    groups, scales = _bytes(layer, layer.k, 8 * size)
    pairs = groups.reshape(*groups.shape[:3], size // 2, 16)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2)  # (..., D / 2, 2, 16 positions)
    codes = codes.transpose(0, 2, 5, 1, 3, 4).reshape(-1, layer.case.kv_heads, size)
    return 2 * codes - 15, scales


def _value_nibbles(layer: Layer) -> tuple[AnyArray, AnyArray]:
    size = layer.case.head_size
    groups, scales = _bytes(layer, layer.v, 8 * size)
    halves = groups.reshape(*groups.shape[:3], 8, size // 16, 2, 8)
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
    codes = codes.transpose(0, 2, 3, 5, 1, 4, 6).reshape(-1, layer.case.kv_heads, size)
    return 2 * codes - 15, scales


def _keys(layer: Layer, interleaved: bool) -> tuple[AnyArray, AnyArray]:
    """Codes (positions, K, D) and scales (positions, K) of sequence 0; attention_codes.h."""
    size = layer.case.head_size
    groups, scales = _groups(layer, layer.k, size, interleaved)
    codes = groups.transpose(0, 2, 5, 1, 3, 4)  # (blocks, groups, 16 positions, K, D / 2, 2)
    return codes.reshape(-1, layer.case.kv_heads, size), scales


def _values(layer: Layer, interleaved: bool) -> tuple[AnyArray, AnyArray]:
    size = layer.case.head_size
    width = -(-size // 16) * 16
    groups, scales = _groups(layer, layer.v, width, interleaved)
    codes = groups.reshape(*groups.shape[:3], 8, width // 16, 2, 16)
    codes = codes.transpose(0, 2, 3, 5, 1, 4, 6)  # (blocks, groups, 8, 2, K, Dp / 16, 16)
    return codes.reshape(-1, layer.case.kv_heads, width)[..., :size], scales


def _groups(
    layer: Layer, pages: AnyArray, width: int, interleaved: bool
) -> tuple[AnyArray, AnyArray]:
    """Codes of each group of sequence 0 in order (blocks, K, groups, vectors, 2, 16), and the
    scales (positions, K)."""
    groups, scales = _bytes(layer, pages, 16 * width)
    vectors = (*groups.shape[:3], width // 2)
    codes = groups.reshape(*vectors, *((16, 2) if interleaved else (2, 16)))
    return codes.swapaxes(-1, -2) if interleaved else codes, scales


def _bytes(layer: Layer, pages: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    """`count` bytes of codes of each group of sequence 0 in order (blocks, K, groups, count), and
    the scales (positions, K)."""
    case = layer.case
    shape = (-1, case.kv_heads, case.page // 16, count + 64)
    groups = np.asarray(pages).reshape(shape)[layer.table[0]]
    scales = np.ascontiguousarray(groups[..., -64:]).view(np.float32)  # (blocks, K, groups, 16)
    return groups[..., :-64], scales.transpose(0, 2, 3, 1).reshape(-1, case.kv_heads)
