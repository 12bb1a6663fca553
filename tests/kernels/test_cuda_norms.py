"""rms_norm, add_rms_norm and layer_norm on the emulator, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.ops.head_norm import HeadNormSpec, head_norm
from vllmx_core.reference import formulas as reference
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.norms import head_runs
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, assert_near, inout, normal, on_device, options, wide

SHAPES = [(3, 1), (3, 33), (1, 36), (3, 130), (3, 1024), (3, 1032)]
EPS = 1e-5


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(emulator: Emulator, dtype: str, rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = normal(rng, (rows, width), dtype), normal(rng, (width,), "f32")
    y = empty(x.shape, x.dtype)
    variant = KERNELS["rms_norm"].variant(**options(dtype, VX_VEC=vector_width(width)))
    emulator.launch(variant, {"rows": rows, "width": width}, [x, weight, y, width, EPS])
    assert_near(y, reference.rms_norm(wide(x), wide(weight), EPS), dtype)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm_normalises_the_rounded_sum(
    emulator: Emulator, dtype: str, rows: int, width: int
) -> None:
    rng = np.random.default_rng(width)
    x, weight = normal(rng, (rows, width), dtype), normal(rng, (width,), "f32")
    before = normal(rng, (rows, width), dtype)
    residual, y = inout(before, before.dtype), empty(x.shape, x.dtype)
    variant = KERNELS["add_rms_norm"].variant(**options(dtype, VX_VEC=vector_width(width)))
    emulator.launch(variant, {"rows": rows, "width": width}, [x, residual, weight, y, width, EPS])
    total = (x.astype(np.float32) + before.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal(residual, total)
    assert_near(y, reference.rms_norm(wide(total), wide(weight), EPS), dtype)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(emulator: Emulator, dtype: str, rows: int, width: int, biased: bool) -> None:
    rng = np.random.default_rng(width)
    x = on_device(rng.standard_normal((rows, width)) + 5, NUMPY_TYPES[dtype])
    weight, bias = normal(rng, (width,), "f32"), normal(rng, (width,), "f32")
    y = empty(x.shape, x.dtype)
    variant = KERNELS["layer_norm"].variant(**options(dtype, VX_VEC=vector_width(width)))
    arguments = [x, weight, bias if biased else None, y, width, EPS]
    emulator.launch(variant, {"rows": rows, "width": width}, arguments)
    want = reference.layer_norm(wide(x), wide(weight), wide(bias) if biased else None, EPS)
    assert_near(y, want, dtype, scale=3)


HEADS = [  # heads, kv heads, size, norms of q and k, kind, across, values
    (2, 1, 20, (1, 1), "rms", 0, 0),
    (4, 2, 16, (1, 1), "layer", 0, 0),
    (3, 3, 33, (1, 1), "rms", 1, 0),
    (2, 1, 130, (0, 1), "rms", 0, 1),
    (1, 1, 1, (0, 0), "rms", 0, 1),
    (40, 2, 64, (1, 0), "rms", 1, 1),
]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("case", HEADS, ids=lambda case: "-".join(map(str, case)))
def test_head_norm(emulator: Emulator, dtype: str, case: tuple[Any, ...]) -> None:
    heads, kv_heads, size, given, kind, across, values = case
    rng, rows = np.random.default_rng(size), 1 if size == 1 else 3
    qkv = normal(rng, (rows, (heads + 2 * kv_heads) * size), dtype)
    norms = [
        normal(rng, (count * size,), "f32") if is_given else None
        for count, is_given in zip((heads, kv_heads), given, strict=True)
    ]
    out = empty(qkv.shape, qkv.dtype)
    variant = KERNELS["head_norm"].variant(**options(dtype, VX_VEC=vector_width(size)))
    sizes = {
        "rows": rows,
        "runs": head_runs(heads, kv_heads, bool(across)),
        "width": heads * size if across else size,
    }
    shape = (heads, kv_heads, size, across, int(kind == "layer"), values, EPS)
    emulator.launch(variant, sizes, [qkv, *norms, out, *shape])
    spec = HeadNormSpec(heads, kv_heads, size, EPS, kind, bool(across), bool(values))
    want = head_norm(wide(qkv), spec, *(None if w is None else wide(w) for w in norms))
    assert_near(out, want, dtype, scale=3)


def test_a_mean_far_from_zero_costs_no_digits(emulator: Emulator) -> None:
    rng = np.random.default_rng(0)
    x = on_device(1000 + rng.standard_normal((2, 256)), np.float32)
    weight, y = on_device(np.ones(256), np.float32), empty(x.shape, x.dtype)
    variant = KERNELS["layer_norm"].variant(**options("f32", VX_VEC=8))
    emulator.launch(variant, {"rows": 2, "width": 256}, [x, weight, None, y, 256, EPS])
    want = reference.layer_norm(wide(x), np.ones(256), None, EPS)
    np.testing.assert_allclose(y, want, atol=2e-4)
