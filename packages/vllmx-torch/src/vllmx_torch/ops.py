"""`vllmx_core.model.Ops` on tensors, op by op. Activations are float32; matrices are multiplied in
the model's dtype, except for the head, whose rounded logits would tie."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.model import Activation, AttentionSpec, StepInputs

from vllmx_torch.attention import Scratch, attention, rms_norm
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import TorchStep
from vllmx_torch.weights import LinearWeight

_HEAD_VALUES = 1 << 24
"""The head goes to float32 in pieces of about so many values."""


@dataclass(frozen=True, slots=True)
class TorchOps:
    """Computes one step at once."""

    pages: tuple[LayerPages, ...]
    scratch: Scratch = field(default_factory=Scratch)

    def embedding(self, ids: Tensor, w: Tensor) -> Tensor:
        return w[ids].float()

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return rms_norm(x, w, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, w: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return rms_norm(total, w, eps), total

    def layer_norm(self, x: Tensor, w: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return functional.layer_norm(x, w.shape, w, bias, eps)

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        return functional.linear(x.to(w.matrix.dtype), w.matrix, w.bias).float()

    def attention(self, qkv: Tensor, spec: AttentionSpec, step: StepInputs) -> Tensor:
        assert isinstance(step, TorchStep)
        return attention(qkv, spec, step, self.pages[spec.layer], self.scratch)

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        if kind == "silu":
            return functional.silu(x)
        if kind == "gelu":
            return functional.gelu(x)
        if kind == "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        if kind == "relu":
            return functional.relu(x)
        raise ValueError(f"unknown activation {kind!r}")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def logits(
        self, x: Tensor, rows: Tensor, w: LinearWeight, softcap: float | None = None
    ) -> Tensor:
        logits = _float_linear(x[rows], w)  # (L, V)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _float_linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x (L, E) float32 times the matrix, without rounding it to the matrix's dtype."""
    if w.matrix.dtype == torch.float32:
        return functional.linear(x, w.matrix, w.bias)
    step = max(1, _HEAD_VALUES // w.matrix.shape[1])
    logits = torch.cat([x @ rows.float().T for rows in w.matrix.split(step)], dim=-1)
    return logits if w.bias is None else logits + w.bias
