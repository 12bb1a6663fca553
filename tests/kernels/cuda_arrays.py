"""Arrays and tolerances that the tests of the CUDA kernels share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from vllmx_cuda.kernel_specs import DTYPES
from vllmx_testing.cuda.emulator import empty

NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
# Half a unit in the last place of the result, and a little for the order of the sums
RELATIVE = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3}

Array = npt.NDArray[Any]
NOTHING_FUSED = (None, None, None, None, 0, 0.0)
"""The arguments `FUSED` of a product that takes in no neighbours."""


def on_device(values: Any, dtype: npt.DTypeLike) -> Array:
    """A read-only copy, aligned as a device allocation is."""
    source = np.asarray(values)
    copy = empty(source.shape, dtype)
    copy[...] = source.astype(dtype)
    copy.flags.writeable = False
    return copy


def inout(values: Any, dtype: npt.DTypeLike) -> Array:
    """The same, writable."""
    source = np.asarray(values)
    copy = empty(source.shape, dtype)
    copy[...] = source.astype(dtype)
    return copy


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> Array:
    """Random device array; its own rounded values are the input of the oracle."""
    return on_device(rng.standard_normal(shape) * scale, NUMPY_TYPES[dtype])


def wide(array: Array) -> npt.NDArray[np.float64]:
    return array.astype(np.float64)


def assert_near(got: Array, want: Array, dtype: str, *, scale: float = 1.0) -> None:
    """Compares within the rounding of `dtype`, times `scale` for kernels that round more than
    once."""
    limit = RELATIVE[dtype] * scale
    np.testing.assert_allclose(wide(got), want, rtol=limit, atol=limit)


def options(dtype: str, **more: int) -> dict[str, int]:
    return {"VX_DTYPE": DTYPES[dtype], **more}
