"""Input features in groups of uneven sizes on the CUDA backend without a GPU: 4 bits stay 4 bits,
and the columns that fill groups up add nothing."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.views import rows_of
from vllmx_cuda.loading.streaming import stream
from vllmx_cuda.matrices import split
from vllmx_cuda.matrices.dense import Dense
from vllmx_cuda.matrices.form import Operands, ProductScratch, Segment, Target
from vllmx_cuda.matrices.pieces import PIECE_BYTES
from vllmx_cuda.matrices.plan import form_of
from vllmx_cuda.matrices.w4 import W4
from vllmx_models.families.qwen import qwen3
from vllmx_models.quantization.gptq import gptq
from vllmx_testing.cuda.emulated_products import array
from vllmx_testing.cuda.emulator import Emulator

from ..integration import quantizers  # noqa: TID252 - no package to name
from .act_order_parts import CASES, Case, act_order
from .cuda_models import EMULATOR, QWEN3, CountingDevice, Quantised, _can_emulate
from .test_cuda_dense import Ops, uploaded
from .test_cuda_ranks import check_cut
from .test_cuda_w4 import quantised

__all__ = ["_can_emulate"]  # a fixture
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def products(
    part: WeightPart,
    dtype: str,
    counts: tuple[int, ...],
    *,
    cuts: tuple[int, ...] = (),
    broken: int | None = None,
    emulator: Emulator = EMULATOR,
) -> tuple[np.ndarray, list[np.ndarray], CountingDevice]:
    """x, its products of so many rows in float32, and what ran.

    Args:
        cuts: rows at which the part is cut into parts of one segment.
        broken: a feature of x that is infinite.
    """
    device, target = CountingDevice(emulator=emulator), Target(dtype, 90)
    form, (rows, cols), most = form_of(part, target), part.shape, max(counts)
    assert isinstance(form, W4)
    data, pieces = device.empty(form.num_bytes(rows, cols)), []
    for first, last in pairwise((0, *cuts, rows)):
        one = rows_of(part, np.arange(first, last))
        assert form_of(one, target) == form
        pieces += form.pieces(one, data, first, rows)
    stream(pieces, device, device.empty(PIECE_BYTES))
    need = form.scratch(rows, cols, most)
    nothing = device.empty(0)
    scratch = ProductScratch(nothing, nothing, device.empty(need.work), nothing)
    x = np.random.default_rng(most).standard_normal((most, cols)).astype(KINDS[dtype])
    if broken is not None:
        x[:, broken] = np.inf
    of_y = device.empty(4 * most * rows)
    operands = Operands(uploaded(device, x), of_y, rows, "f32")
    segment = Segment(form, data, 0, rows, cols)
    product = form.product(Ops(device, target, scratch), segment, operands)
    found = []
    for count in counts:
        product.enqueue(count)
        found.append(array(of_y, np.float32)[: count * rows].reshape(count, rows).copy())
    return x, found, device


def check_product(case: Case, dtype: str, counts: tuple[int, ...], **how: Any) -> None:
    """Exact products and sums in float32, but for weights that are rounded for many rows."""
    x, found, device = products(case.part, dtype, counts, **how)
    assert not device.entries["w4_repack_words"], "the kernel knows equal groups alone"
    x = x.astype(np.float64)
    want, terms = x @ case.weights.T, abs(x) @ abs(case.weights).T
    for y in found:
        m = len(y)
        near = 2.0**-8 if m > 128 and dtype != "f32" else 3e-6
        assert (abs(y - want[:m]) <= near * terms[:m]).all()


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    """One row, some, and so many that they meet dequantised weights."""
    check_product(CASES[name], "bf16", (1, 9, 130))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_products_of_other_types(dtype: str) -> None:
    check_product(CASES["pack_int 4 bit"], dtype, (2, 130))


def test_parts_of_one_order_lie_below_each_other() -> None:
    check_product(CASES["gptq 4 bit"], "bf16", (3, 130), cuts=(16, 64))


def test_blocks_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counters lie behind the tiles of the filled columns, and are zeros afterwards."""
    monkeypatch.setattr(split, "OWN_TOKENS", 64)
    monkeypatch.setattr(split, "splits", lambda *_: 2)
    check_product(CASES["gptq 4 bit"], "bf16", (9, 9, 1))


def test_the_checking_build_finds_nothing() -> None:
    check_product(CASES["gptq 4 bit"], "bf16", (3,), emulator=Emulator(check=True))


def test_rows_of_a_rank_are_integers_without_words() -> None:
    """Rows that begin within a word, as a rank may have them, are decoded first."""
    case = CASES["gptq 4 bit"]
    index = np.arange(4, 68)
    part = rows_of(case.part, index)
    assert part.layout.kind == "integers"
    check_product(Case(part, case.codes[index], case.zeros[index]), "bf16", (3,))


def test_what_is_infinite_goes_no_further() -> None:
    """A filling column does not read the feature whose group it fills up."""
    case = CASES["gptq 4 bit"]
    codes = case.part.coded_rows(0, case.part.shape[0])
    assert codes.group_of is not None
    alone = int(np.flatnonzero(codes.group_of == 0)[0])
    _, (y,), _ = products(case.part, "bf16", (1,), broken=alone)
    # a weight of 0 times infinity is none, in the row that has it
    assert (np.isnan(y[0]) == (case.weights[:, alone] == 0)).all()


@pytest.mark.parametrize("name", CASES)
def test_bits_a_weight(name: str) -> None:
    part = CASES[name].part
    form = form_of(part, Target("bf16", 90))
    assert isinstance(form, W4)
    rows, cols = part.shape
    width = 192 if name == "whole units" else 480
    assert form.packing.width(cols) == width
    zero = 0 if "symmetric" in name else 8
    in_tiles = -(-width // 64) * 64 * form.packing.bits + width // 32 * (16 + zero)
    assert 8 * form.packing.row_tile_bytes(cols) == 16 * in_tiles
    assert 8 * form.num_bytes(rows, cols) < 16 * rows * cols


def test_groups_that_would_take_more_than_16_bits() -> None:
    part = act_order("gptq", 4, [8] * 24).part
    assert isinstance(form_of(part, Target("bf16", 90)), Dense)


MODEL = qwen3(QWEN3 | {"head_dim": 64})
"""Attention's output has 256 input features in two groups, of each of which a rank has about 64."""


def model_source() -> Quantised:
    make = partial(quantizers.gptq, bits=4, group_size=128, shuffled=True, v2=False)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
    return quantised(make, gptq, config, model=MODEL)


def test_ranks_keep_their_bits(caplog: pytest.LogCaptureFixture) -> None:
    check_cut(MODEL, model_source(), caplog)
