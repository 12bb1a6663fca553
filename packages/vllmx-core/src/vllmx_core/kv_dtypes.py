"""The dtypes of a KV cache, and the quantisation of keys and values to 8 bits.

A vector is one token's key (normed and rotated) or value of one kv head, D numbers. Each is
quantised by itself when it is written, so that pages do not depend on the batch:

    scale = max |x| / limit               limit is 127 (int8) or 448 (fp8, the largest e4m3)
    code  = nearest(x * (limit / max |x|))   to an integer or an e4m3 value, ties to even
    value = code * scale

all in float32, so that every backend computes the same codes and scales. A vector without a value
above 1e-30 is zero; one with NaN or infinity has the scale NaN, which results inherit.

Unlike vLLM's fp8 without calibration, fp8 has a scale too: e4m3 is precise between 2^-6 and 448,
and the values of many models are smaller.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.dtypes import short_dtype
from vllmx_core.errors import ConfigError
from vllmx_core.plan import F32
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16, float8_to_f32

KV_DTYPES = ("bf16", "f16", "f32", "int8", "fp8")
LIMITS = {"int8": 127.0, "fp8": 448.0}
"""The largest code of each 8-bit dtype."""
_NOTHING = 1e-30
_E4M3 = float8_to_f32(np.arange(127, dtype=np.uint8), "f8e4m3")
_E4M3_BETWEEN = (_E4M3[:-1] + _E4M3[1:]) / 2

Floats = npt.NDArray[np.floating[Any]]
Codes = npt.NDArray[np.int8] | npt.NDArray[np.uint8]


def kv_dtype(wanted: str, has: Collection[str], automatic: str, backend: str) -> str:
    """The dtype that `LoadOptions.kv_cache_dtype` asks for; `automatic` for auto. Raises
    ConfigError for an unknown name, and for a dtype that the backend does not have."""
    name = "fp8" if wanted == "fp8_e4m3" else short_dtype(wanted)
    if name == "auto":
        return automatic
    choices = ", ".join(("auto", *has))
    if name in has:
        return name
    problem = (
        f"the {backend} backend has no KV cache of {name}"
        if name in KV_DTYPES
        else f"there is no kv_cache_dtype {wanted!r}"
    )
    raise ConfigError(f"{problem}: choose {choices}", param="kv_cache_dtype")


def quantise(x: Floats, dtype: str) -> tuple[Codes, F32]:
    """(..., D) -> codes (..., D), int8 or the bytes of e4m3, and scales (...)."""
    scaled, scale = at_limit(np.asarray(x, np.float32), dtype)
    codes = np.rint(scaled).astype(np.int8) if dtype == "int8" else _e4m3(scaled)
    return codes, scale


def at_limit(x: Array, dtype: str, xp: Arrays = NUMPY) -> tuple[Array, Array]:
    """(..., D) float32 -> the same with each vector's greatest value at the limit of the codes, and
    scales (...)."""
    greatest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    scaled, scale = xp.fused(_at_limit, LIMITS[dtype])(x, greatest)
    return scaled, scale[..., 0]


def _at_limit(xp: Arrays, limit: float, x: Array, greatest: Array) -> tuple[Array, Array]:
    finite = xp.isfinite(greatest)  # the maximum of anything and NaN is NaN
    some = finite & (greatest > _NOTHING)
    divisor = xp.where(some, greatest, 1.0)
    scaled = xp.where(finite, x, 0.0) * xp.where(some, limit / divisor, 0.0)
    scale = xp.where(some, divisor / limit, xp.where(finite, 0.0, xp.nan))
    return scaled, xp.like(x, scale)


def dequantise(codes: Codes, scales: F32) -> F32:
    """The inverse of `quantise`: int8 codes are integers, bytes are e4m3."""
    values = (
        codes.astype(np.float32)
        if codes.dtype == np.int8
        else float8_to_f32(codes.astype(np.uint8), "f8e4m3")
    )
    return values * scales[..., None]


def rounded(x: Floats, dtype: str) -> Floats:
    """(..., D) as a cache of that dtype gives it back, in the dtype of x."""
    if dtype in LIMITS:
        return dequantise(*quantise(x, dtype)).astype(x.dtype)
    if dtype == "bf16":
        return bf16_to_f32(f32_to_bf16(x.astype(np.float32))).astype(x.dtype)
    narrow = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]
    return x.astype(narrow).astype(x.dtype)


def _e4m3(x: F32) -> npt.NDArray[np.uint8]:
    """The byte of the nearest value, ties to even; beyond 448 it is 448."""
    magnitude = np.abs(x)
    codes = np.searchsorted(_E4M3_BETWEEN, magnitude, side="left")
    tied = magnitude == _E4M3_BETWEEN[np.minimum(codes, len(_E4M3_BETWEEN) - 1)]
    codes = codes + (tied & (codes % 2 == 1))
    signed: npt.NDArray[np.uint8] = (codes + 128 * np.signbit(x)).astype(np.uint8)
    return signed
