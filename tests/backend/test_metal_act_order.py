"""Input features in groups of uneven sizes on MLX: 4 bits stay 4 bits, and the columns that fill
groups up add nothing."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.weights.views import rows_of

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.matrices import QuantisedMatrix  # noqa: E402
from vllmx_metal.quantised import native_form, quantised_matrix  # noqa: E402

from .act_order_parts import CASES, Case, act_order  # noqa: E402


def check_product(case: Case, dtype: str, near: float) -> QuantisedMatrix:
    """Codes and zeros are multiplied apart: `near` is relative to what both come to."""
    form, kind = native_form(case.part), getattr(mx, dtype)
    assert form is not None
    matrix = quantised_matrix(case.part, form, kind)
    given = np.random.default_rng(3).standard_normal((5, case.part.shape[1]))
    x = mx.array(given.astype(np.float32)).astype(kind)
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    found = np.array(matrix.multiply(x).astype(mx.float32))
    terms = abs(wide) @ (case.codes + case.zeros).T
    assert (abs(found - wide @ case.weights.T) <= near * terms).all()
    return matrix


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    """In float32, and how much is held."""
    part = CASES[name].part
    matrix, (rows, cols) = check_product(CASES[name], "float32", 1e-6), part.shape
    width, form = 192 if name == "whole units" else 480, native_form(part)
    assert form is not None
    assert matrix.scales.shape == (rows, width // 32)
    assert matrix.bits == form.bits == part.layout.bits
    held = sum(array.nbytes for array in matrix.arrays)
    assert held == form.num_bytes(rows, cols) < 2 * rows * cols


@pytest.mark.parametrize(
    ("dtype", "near", "factors"), [("float16", 1e-3, "float16"), ("bfloat16", 1e-6, "float32")]
)
def test_products_of_smaller_types(dtype: str, near: float, factors: str) -> None:
    """Scales of float16 are no bfloat16."""
    matrix = check_product(CASES["gptq 4 bit"], dtype, near)
    assert matrix.scales.dtype == getattr(mx, factors)


def test_rows_of_a_rank_are_integers_without_words() -> None:
    """Rows that begin within a word, as a rank may have them, are decoded first."""
    case, index = CASES["gptq 4 bit"], np.arange(4, 68)
    part = rows_of(case.part, index)
    assert part.layout.kind == "integers"
    check_product(Case(part, case.codes[index], case.zeros[index]), "float32", 1e-6)


def test_groups_that_would_take_more_than_16_bits() -> None:
    assert native_form(act_order("gptq", 4, [8] * 24).part) is None


@pytest.mark.parametrize("shuffled", [True, False])
def test_equal_groups_stay_as_large_as_they_are(shuffled: bool) -> None:
    """Features that are in order are not gathered, though `g_idx` is there."""
    case = act_order("pack_int", 4, [64] * 3, shuffled=shuffled)
    form = native_form(case.part)
    assert form is not None
    assert (form.group_size, len(form.order)) == (64, 4 * 192 * shuffled)
    check_product(case, "float32", 1e-6)
