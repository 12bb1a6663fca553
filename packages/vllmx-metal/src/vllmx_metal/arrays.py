"""`vllmx_core.arrays.Arrays` of MLX. Formulas compute in float32 and round once; chains of
elementwise operations are one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from vllmx_core.arrays import Arrays
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.tensor import RawTensor

from vllmx_metal.fusion import fused

DTYPES: Mapping[str, mx.Dtype] = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
"""The dtypes that a model can be computed in."""
_UPLOADED = {"f": np.float32, "i": np.int32, "u": np.uint32, "b": np.bool_}
_MASS_BITS = 40
"""Probabilities are integers of 2 ** -40 of the likeliest id's; a row of 2 ** 22 ids fits int64."""


class MetalArrays(Arrays):
    """MLX."""

    module: ClassVar[Any] = mx

    def wide(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)

    def widest(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)  # a GPU of Apple's has nothing wider

    def upload(self, x: mx.array, values: AnyArray) -> mx.array:
        return mx.array(np.array(values, _UPLOADED[values.dtype.kind], order="C"))

    def fused(self, function: Callable[..., Any], *options: object) -> Callable[..., Any]:
        return _fused(function, *options)

    def argmax(self, x: mx.array, axis: int) -> mx.array:
        ids: mx.array = mx.argmax(x, axis)
        return ids.astype(mx.int32)

    def greatest(self, x: mx.array, count: int) -> mx.array:
        if not count:
            return x[..., :0]
        top: mx.array = self.descending(mx.topk(x, count, axis=-1))
        return top

    def mass(self, order: mx.array, share: F32) -> tuple[mx.array, mx.array]:
        """See `Arrays.mass`. Integers replace float64: they are exact in any order."""
        mass = mx.cumsum((mx.exp(order) * 2.0**_MASS_BITS).astype(mx.int64), axis=-1)
        # share = mantissa * 2 ** (exponent - 24); the product with the total keeps within 64 bits
        mantissa, exponent = np.frexp(np.minimum(share, 1).astype(np.float64))
        factor = mx.array((mantissa * (1 << 24)).astype(np.int64))[:, None]
        shift = mx.array(np.clip(-exponent, 0, 62).astype(np.int64))[:, None]
        total, rest = mass[:, -1:], mass[:, -1:] & ((1 << 24) - 1)
        return mass, ((total >> 24) * factor + ((rest * factor) >> 24)) >> shift

    def word_product(self, factor: int, word: mx.array) -> tuple[mx.array, mx.array]:
        wide = word.astype(mx.uint64) * factor
        return (wide >> 32).astype(mx.uint32), wide.astype(mx.uint32)

    def hadamard(self, x: mx.array) -> mx.array:
        return mx.hadamard_transform(x)

    def rms_norm(self, x: mx.array, w: mx.array | None, eps: float) -> mx.array:
        if w is None or w.ndim == 1:
            return mx.fast.rms_norm(x, w, eps)
        return mx.fast.rms_norm(x, None, eps) * w

    def layer_norm(
        self, x: mx.array, w: mx.array | None, bias: mx.array | None, eps: float
    ) -> mx.array:
        if w is None or w.ndim == 1:
            return mx.fast.layer_norm(x, w, bias, eps)
        return mx.fast.layer_norm(x, None, None, eps) * w  # no bias comes with these


METAL = MetalArrays()


@cache
def _fused(function: Callable[..., Any], *options: object) -> Callable[..., Any]:
    return fused(partial(function, METAL, *options))


def to_mlx(raw: RawTensor) -> mx.array:
    """A copy of a dense tensor of one of `DTYPES`, in that dtype."""
    array = mx.array(np.ascontiguousarray(raw.view()))
    return array.view(mx.bfloat16) if raw.dtype == "bf16" else array
