"""`vllmx_core.arrays.Arrays` of MLX. Formulas compute in float32 and round once; chains of
elementwise operations are one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import mlx.core as mx
from vllmx_core.arrays import Arrays

from vllmx_metal.fusion import fused


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
