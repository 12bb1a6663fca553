"""Activation functions on MLX arrays, computed in float32 and rounded once, fused by MLX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import mlx.core as mx

from vllmx_metal.fusion import fused

_GELU_TANH = math.sqrt(2 / math.pi)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(_GELU_TANH * (x + 0.044715 * x * x * x)))


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def _rounded_once(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    return fused(lambda x: function(x.astype(mx.float32)).astype(x.dtype))


def _gated(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    def gate(x: mx.array, up: mx.array) -> mx.array:
        return (function(x.astype(mx.float32)) * up).astype(x.dtype)

    return fused(gate)


_FUNCTIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu}
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    kind: _rounded_once(function) for kind, function in _FUNCTIONS.items()
}
GATES: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = {
    kind: _gated(function) for kind, function in _FUNCTIONS.items()
}


def _opens(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    """x times function(g), where they are of shapes that fit."""
    return fused(lambda x, g: (x * function(g.astype(mx.float32))).astype(x.dtype))


def _sigmoid(g: mx.array) -> mx.array:
    return mx.sigmoid(g)


def _tanh(g: mx.array) -> mx.array:
    return mx.tanh(g)


_GATE_FUNCTIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    **_FUNCTIONS,
    "sigmoid": _sigmoid,
    "identity": lambda g: g,
    "tanh": _tanh,
    "relu2": lambda g: mx.square(mx.maximum(g, 0)),
}
OPENINGS = {kind: _opens(function) for kind, function in _GATE_FUNCTIONS.items()}


UNGATED = ACTIVATIONS | {"relu2": _rounded_once(_GATE_FUNCTIONS["relu2"])}
"""Activations of experts without a gate."""
