"""What stands around the calls between ranks, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, inout, normal, on_device, options, wide

# Vectors of all widths, one value, and a little more than a block takes
WIDTHS = [
    ("f32", 1), ("f32", 257), ("f32", 130), ("f32", 1028), ("f32", 2056),
    ("f16", 1), ("f16", 33), ("f16", 514), ("f16", 2056),
    ("bf16", 1), ("bf16", 257), ("bf16", 1028), ("bf16", 2056),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 259])
def test_own_ids(emulator: Emulator, count: int) -> None:
    """The rank has 30 rows of a table from id 17 on."""
    ids = np.resize([17, 16, 46, 47, 0, 90, 30], count)
    rows = empty(count, np.int32)
    variant = KERNELS["own_ids"].variant(**options("f32", VX_VEC=1))
    emulator.launch(variant, {"count": count}, [on_device(ids, np.int32), rows, count, 17, 30])
    np.testing.assert_array_equal(rows, np.where((ids >= 17) & (ids < 47), ids - 17, 0))


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_rows_of_others_become_zeros(emulator: Emulator, dtype: str, width: int) -> None:
    ids = np.array([5, 4, 8, 9, 8][: 1 if width > 2000 else 5])
    before = wide(normal(np.random.default_rng(width), (len(ids), width), dtype))
    y = inout(before, NUMPY_TYPES[dtype])
    want = np.where(((ids >= 5) & (ids < 9))[:, None], before, 0)
    variant = KERNELS["keep_own"].variant(**options(dtype, VX_VEC=vector_width(width)))
    sizes = {"rows": len(ids), "width": width}
    emulator.launch(variant, sizes, [on_device(ids, np.int32), y, width, 5, 4])
    np.testing.assert_array_equal(wide(y), want)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_answers_of_experts_are_added(emulator: Emulator, dtype: str, width: int) -> None:
    """Of 7 experts on 3 ranks, 2, 2 and 3, in the order of the ranks. What a rank sends of a token
    that asked none of its experts counts not at all; one that was asked twice answers once."""
    rows, random = 1 if width > 2000 else 5, np.random.default_rng(width)
    ids = np.array([[6, 0], [1, 0], [3, 4], [2, 3], [5, 1]])[:rows]
    held = np.array([[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0], [1, 0, 1]], bool)[:rows]
    parts = inout(normal(random, (3, rows, width), dtype), NUMPY_TYPES[dtype])
    parts[~held.T] = np.nan
    y = empty((rows, width), parts.dtype)
    variant = KERNELS["add_held"].variant(**options(dtype, VX_VEC=vector_width(width)))
    given = [parts, on_device(ids, np.int32), y, width, 2, 7, 3]
    emulator.launch(variant, {"rows": rows, "width": width}, given)
    total = np.zeros((rows, width), np.float32)
    for part, has in zip(parts, held.T, strict=True):
        total[has] += part[has].astype(np.float32)
    np.testing.assert_array_equal(wide(y), wide(total.astype(parts.dtype)))


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_parts_go_side_by_side(emulator: Emulator, dtype: str, width: int) -> None:
    rows, random = 1 if width > 2000 else 3, np.random.default_rng(width)
    parts = [normal(random, (rows, some), dtype) for some in (2 * width, width)]
    y = empty((rows, 3 * width), parts[0].dtype)
    variant = KERNELS["join_columns"].variant(**options(dtype, VX_VEC=vector_width(width)))
    for part, first in zip(parts, (0, 2 * width), strict=True):
        own = part.shape[1]
        target = y.reshape(-1)[first:]
        emulator.launch(variant, {"rows": rows, "width": own}, [part, target, own, 3 * width])
    np.testing.assert_array_equal(wide(y), np.hstack([wide(part) for part in parts]))
