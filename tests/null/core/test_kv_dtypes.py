"""The names of KV cache dtypes, and the rotation and rounding of q4."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.cache.capacity import plain_page_bytes
from vllmx_core.errors import ConfigError
from vllmx_core.kv_dtypes import KV_DTYPES, kv_dtype, quantise, rounded, turned
from vllmx_core.model import KVSpec


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("auto", "f16"),
        ("bfloat16", "bf16"),
        ("q8", "int8"),
        ("q4,q4", "q4"),
        ("q8_0,q4_0", "q8,q4"),  # llama.cpp's
        ("int8,q4", "q8,q4"),
        ("turboquant_k8v4", "q8,q4"),  # vLLM's
        ("turboquant_4bit_nc", "q4"),
        ("int4_per_token_head", "q4"),
        ("fp8_e4m3", "fp8"),
        *((name, name) for name in KV_DTYPES),
    ],
)
def test_names(given: str, name: str) -> None:
    assert kv_dtype(given, KV_DTYPES, "f16", "CPU") == name


@pytest.mark.parametrize(
    ("given", "has", "message"),
    [
        ("q4,q8", KV_DTYPES, "no kv_cache_dtype 'q4,q8': choose auto, .*, q4 or q8,q4"),
        ("bf16,q4", KV_DTYPES, "no kv_cache_dtype 'bf16,q4'"),
        ("q4", ("f32", "int8"), "CPU backend has no KV cache of q4: choose auto, f32 or int8"),
        ("q8,q4", ("f32", "int8"), "CPU backend has no KV cache of q8,q4"),
    ],
)
def test_other_names_are_refused(given: str, has: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_dtype(given, has, "f16", "CPU")


@pytest.mark.parametrize(("size", "run"), [(16, 16), (80, 16), (96, 32), (128, 128)])
def test_the_rotation_is_that_of_hadamard_matrices(size: int, run: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < run:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole = np.kron(np.eye(size // run), matrix / np.sqrt(run))
    x = np.random.default_rng(0).standard_normal((3, 5, size))
    np.testing.assert_allclose(turned(x), x @ whole, atol=1e-12)
    np.testing.assert_allclose(turned(turned(x)), x, atol=1e-12)


def test_q4_has_sixteen_values_and_no_error_beyond_half_a_step() -> None:
    x = np.random.default_rng(1).standard_normal((400, 64))
    codes, scales = quantise(x, "q4")
    assert set(np.unique(codes)) == set(range(-15, 16, 2))
    assert (np.abs(codes).max(axis=1) == 15).all()
    off = turned(rounded(x, "q4") - x)
    assert (np.abs(off).max(axis=1) <= scales * (1 + 1e-5)).all()
    assert not rounded(np.zeros((2, 64)), "q4").any()
    assert np.isnan(rounded(np.where(x == x[0, 0], np.inf, x), "q4")[0]).all()


def test_a_number_far_from_the_others_costs_the_others_little() -> None:
    """Which is what the rotation is for: without it they would all be zero or one step."""
    x = np.random.default_rng(2).standard_normal((400, 128))
    x[:, 5] = 40
    off = rounded(x, "q4") - x
    assert np.sqrt(np.square(off).mean()) < 0.5
    assert np.sqrt(np.square(x * 7.5 / 40 - np.rint(x * 7.5 / 40)).mean()) * 40 / 7.5 > 0.9


@pytest.mark.parametrize(
    ("dtype", "keys", "values"),
    [("bf16", 160, 160), ("int8", 84, 84), ("q4", 44, 44), ("q8,q4", 84, 44)],
)
def test_bytes_of_a_page(dtype: str, keys: int, values: int) -> None:
    assert plain_page_bytes(KVSpec(3, 80), 16, dtype) == (48 * keys, 48 * values)
