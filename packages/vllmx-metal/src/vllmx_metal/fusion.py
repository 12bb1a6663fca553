"""Chains of elementwise operations as one kernel on the GPU. On the CPU `mx.compile` would call a
C++ compiler for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import mlx.core as mx

Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function) -> Function:
    """The function, compiled for any shape where a GPU is. It takes and returns arrays and numbers
    and looks at no value."""
    if not mx.metal.is_available():
        return function
    return cast(Function, mx.compile(function, shapeless=True))
