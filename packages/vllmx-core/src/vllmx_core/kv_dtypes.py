"""The dtypes of a KV cache, and the quantisation of keys and values to 8 and 4 bits.

A vector is one token's key (normed and rotated) or value of one kv head, D numbers. Each is
quantised by itself when it is written, so that pages do not depend on the batch:

    scale = max |x| / limit               limit is 127 (int8) or 448 (fp8, the largest e4m3)
    code  = nearest(x * (limit / max |x|))   to an integer or an e4m3 value, ties to even
    value = code * scale

all in float32, so that every backend computes the same codes and scales. A vector without a value
above 1e-30 is zero; one with NaN or infinity has the scale NaN, which results inherit.

q4 rotates the vector first (`turned`), which spreads a large number over many, and its limit is 15:

    code  = nearest(x * (limit / max |x|) / 2 + 7.5)   0 to 15
    value = (2 * code - 15) * scale                    16 values, as many above 0 as below

A rotation changes no product of two vectors. So backends rotate the queries, not the cached keys,
and rotate the sums of values back, not the values. Backends may add in other orders, so a code near
a tie may differ.

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

KV_DTYPES = ("bf16", "f16", "f32", "int8", "fp8", "q4", "q8,q4")
"""q8,q4: keys are int8, values q4; see `sides`."""
LIMITS = {"int8": 127.0, "fp8": 448.0, "q4": 15.0}
"""The largest code of each dtype of codes, in units of the scale."""
CODED = (*LIMITS, "q8,q4")
"""The `KV_DTYPES` that keep codes."""
TURNED_MULTIPLE = 16
"""Head sizes that can be q4 are multiples of it: shorter rotations would spread too little."""
_ALIASES = {
    "q8": "int8",
    "q8_0": "int8",
    "q4_0": "q4",
    "int8,q4": "q8,q4",
    "fp8_e4m3": "fp8",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8",
    "int4_per_token_head": "q4",
    "turboquant_4bit_nc": "q4",
    "turboquant_k8v4": "q8,q4",
}
"""Names of llama.cpp and vLLM."""
_NOTHING = 1e-30
_E4M3 = float8_to_f32(np.arange(127, dtype=np.uint8), "f8e4m3")
_E4M3_BETWEEN = (_E4M3[:-1] + _E4M3[1:]) / 2

Floats = npt.NDArray[np.floating[Any]]
Codes = npt.NDArray[np.int8] | npt.NDArray[np.uint8]


def kv_dtype(wanted: str, has: Collection[str], automatic: str, backend: str) -> str:
    """The dtype that `LoadOptions.kv_cache_dtype` asks for; `automatic` for auto. Raises
    ConfigError for an unknown name, and for a dtype that the backend does not have."""
    parts = [_ALIASES.get(part, short_dtype(part)) for part in wanted.split(",")]
    name = parts[0] if len(set(parts)) == 1 else ",".join(parts)
    name = _ALIASES.get(name, name)
    if name == "auto":
        return automatic
    *choices, last = ("auto", *has)
    if name in has:
        return name
    problem = (
        f"the {backend} backend has no KV cache of {name}"
        if name in KV_DTYPES
        else f"there is no kv_cache_dtype {wanted!r}"
    )
    raise ConfigError(
        f"{problem}: choose {', '.join(choices)} or {last}",
        param="kv_cache_dtype",
    )


def sides(dtype: str) -> tuple[str, str]:
    """The dtypes of keys and of values."""
    return ("int8", "q4") if dtype == "q8,q4" else (dtype, dtype)


def quantise(x: Floats, dtype: str) -> tuple[Codes, F32]:
    """(..., D) -> codes (..., D), int8 or the bytes of e4m3, and scales (...). Those of q4 are odd
    int8 of the rotated vector, -15 to 15."""
    if dtype == "q4":
        packed, scale = packed_nibbles(np.asarray(x, np.float32))
        return unpacked_nibbles(packed).astype(np.int8), scale
    scaled, scale = at_limit(np.asarray(x, np.float32), dtype)
    codes = np.rint(scaled).astype(np.int8) if dtype == "int8" else _e4m3(scaled)
    return codes, scale


def turned(x: Array, xp: Arrays = NUMPY) -> Array:
    """(..., D) rotated by the Walsh-Hadamard transform of each run of D & -D numbers, the greatest
    power of two that divides D. It is its own inverse."""
    run = x.shape[-1] & -x.shape[-1]
    return xp.hadamard(x.reshape(*x.shape[:-1], -1, run)).reshape(x.shape)


def packed_nibbles(x: Array, xp: Arrays = NUMPY) -> tuple[Array, Array]:
    """(..., D) float32 -> q4 codes (..., D / 2), bytes that hold feature 2i and, in the upper half,
    2i + 1, and scales (...)."""
    scaled, scale = at_limit(turned(x, xp), "q4", xp)
    codes = xp.cast(xp.round(scaled * 0.5 + 7.5), xp.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def unpacked_nibbles(packed: Array, xp: Arrays = NUMPY) -> Array:
    """(..., D / 2) -> (..., D) float32, in units of the scale and still rotated."""
    pairs = xp.stack([packed & 15, packed >> 4], axis=-1)
    return xp.cast(pairs, xp.float32).reshape(*packed.shape[:-1], -1) * 2 - 15


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
    """The inverse of `quantise`, but for the rotation: int8 codes are integers, bytes are e4m3."""
    values = (
        codes.astype(np.float32)
        if codes.dtype == np.int8
        else float8_to_f32(codes.astype(np.uint8), "f8e4m3")
    )
    return values * scales[..., None]


def rounded(x: Floats, dtype: str) -> Floats:
    """(..., D) as a cache of that dtype gives it back, in the dtype of x."""
    if dtype in LIMITS:
        values: Floats = dequantise(*quantise(x, dtype)).astype(x.dtype)
        return turned(values) if dtype == "q4" else values
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
