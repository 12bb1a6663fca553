"""`vllmx_core.model.Ops` on MLX arrays. The residual stream and what norms make of it are float32;
matrices, attention and gates work in the model's dtype, and MLX's kernels sum in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
from vllmx_core.model import Activation, AttentionSpec, StepInputs

from vllmx_metal.attention import attention
from vllmx_metal.fusion import fused
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.matrices import LinearWeight, Matrix
from vllmx_metal.step import MetalStep

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
_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    kind: _rounded_once(function) for kind, function in _FUNCTIONS.items()
}
_GATES: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = {
    kind: _gated(function) for kind, function in _FUNCTIONS.items()
}


@dataclass(frozen=True, slots=True)
class MetalOps:
    """Builds the graph of one step; nothing is computed until it is submitted."""

    pages: tuple[LayerPages, ...]
    dtype: mx.Dtype

    def embedding(self, ids: mx.array, w: Matrix) -> mx.array:
        return w.rows(ids).astype(mx.float32)

    def rms_norm(self, x: mx.array, w: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, w, eps)

    def add_rms_norm(
        self, x: mx.array, residual: mx.array | None, w: mx.array, eps: float
    ) -> tuple[mx.array, mx.array]:
        total = x if residual is None else x + residual
        return mx.fast.rms_norm(total, w, eps), total

    def layer_norm(self, x: mx.array, w: mx.array, bias: mx.array | None, eps: float) -> mx.array:
        return mx.fast.layer_norm(x, w, bias, eps)

    def linear(self, x: mx.array, w: LinearWeight) -> mx.array:
        return w.multiply(x).astype(self.dtype)

    def attention(self, qkv: mx.array, spec: AttentionSpec, step: StepInputs) -> mx.array:
        assert isinstance(step, MetalStep)
        return attention(qkv, spec, step, self.pages[spec.layer])

    def gated_act(self, gate_up: mx.array, kind: Activation) -> mx.array:
        gate, up = mx.split(gate_up, 2, axis=-1)
        return _GATES[kind](gate, up)

    def activation(self, x: mx.array, kind: Activation) -> mx.array:
        return _ACTIVATIONS[kind](x)

    def add(self, x: mx.array, y: mx.array) -> mx.array:
        return x + y

    def scale(self, x: mx.array, factor: float) -> mx.array:
        return x * factor

    def logits(
        self, x: mx.array, rows: mx.array, w: LinearWeight, softcap: float | None = None
    ) -> mx.array:
        logits = w.multiply(x[rows]).astype(mx.float32)  # (L, V)
        return logits if softcap is None else softcap * mx.tanh(logits / softcap)
