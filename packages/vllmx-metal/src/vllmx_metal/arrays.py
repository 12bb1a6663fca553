"""`vllmx_core.arrays.Arrays` of MLX. Formulas compute in float32 and round once; chains of
elementwise operations are one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from vllmx_core.arrays import Arrays
from vllmx_core.weights.tensor import RawTensor

from vllmx_metal.fusion import fused

DTYPES: Mapping[str, mx.Dtype] = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
"""The dtypes that a model can be computed in."""


class MetalArrays(Arrays):
    """MLX."""

    library: ClassVar[Any] = mx

    def wide(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)

    def fused(self, function: Callable[..., Any], *options: object) -> Callable[..., Any]:
        return _fused(function, *options)

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
