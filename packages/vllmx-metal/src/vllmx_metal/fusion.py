"""Chains of elementwise operations as one kernel on the GPU. On the CPU `mx.compile` would call a
C++ compiler for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import mlx.core as mx

Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function) -> Function:
    """The function, compiled for any shape where a GPU is. It takes and returns arrays, is
    elementwise but for broadcasts, and looks at no value and no shape: what it saw of the first
    call would be kept for all."""
    if not mx.metal.is_available():
        return function
    return cast(Function, mx.compile(function, shapeless=True))
