"""Recurrent layers in plain torch: all rows of a step side by side, token after token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.cache.state_rows import StateRows, conv_windows
from vllmx_core.ops.recurrence import RecurrenceSpec, RecurrenceWeights, prepared
from vllmx_core.ops.short_conv import ShortConvSpec

from vllmx_torch.arrays import TORCH
from vllmx_torch.step import TorchStep
from vllmx_torch.transfer import upload


@dataclass(frozen=True, slots=True)
class StateStep:
    """The rows of a step and where their states are, for all layers."""

    step: TorchStep
    rows: StateRows
    source: Tensor  # (R,) slots, the longest row first
    target: Tensor  # (R,)
    kept: Tensor  # (M,) slots of the states after `StateRows.keeping`
    _windows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: TorchStep) -> StateStep:
        """The rows of a step."""
        rows, device = StateRows.of(step.plan), step.tokens.device
        source, target = upload(np.stack([rows.source, rows.target]), np.int64, device)
        kept = upload(rows.after[rows.keeping], np.int64, device)
        return cls(step, rows, source, target, kept)

    def windows(self, kernel: int) -> tuple[Tensor, Tensor]:
        """See `conv_windows`; made for the first layer that asks."""
        if kernel not in self._windows:
            device = self.step.tokens.device
            read, kept = conv_windows(self.step.plan, self.rows, kernel)
            self._windows[kernel] = upload(read, np.int64, device), upload(kept, np.int64, device)
        return self._windows[kernel]

    def before(self, states: Tensor) -> Tensor:
        """(R, heads, rows, cols) out of (slots, ...): a copy, zeros for rows that begin."""
        found = states[self.source.clamp(min=0)]
        return torch.where(self.source[:, None, None, None] < 0, 0.0, found)


def short_conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    spec: ShortConvSpec,
    step: StateStep,
    states: Tensor,
) -> Tensor:
    """(T, C) -> (T, C), over and into the states (slots, 1, K - 1, C)."""
    seen = torch.cat([step.before(states).flatten(0, 2), x])  # (R * (K - 1) + T, C)
    windows, kept = step.windows(spec.kernel)
    out = torch.einsum("tkc,ck->tc", seen[windows], w.view(-1, spec.kernel))
    states[torch.cat([step.target, step.kept]), 0] = seen[kept]
    out = out if bias is None else out + bias
    return out if spec.activation is None else functional.silu(out)


def recurrence(
    qkv: Tensor,
    a: Tensor,
    b: Tensor | None,
    spec: RecurrenceSpec,
    weights: RecurrenceWeights[Tensor],
    step: StateStep,
    states: Tensor,
) -> Tensor:
    """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv), over and into the states (slots, H, Dk, Dv)."""
    q, k, v, decay, strength = prepared(qkv, a, b, spec, weights, TORCH)
    state, out = step.before(states), torch.empty_like(v)  # (R, H, Dk, Dv), (T, H, Dv)
    for tokens in step.rows.tokens():
        at = torch.from_numpy(tokens).to(v.device)
        now = state[: len(tokens)].mul_(decay[at])
        new = v[at]
        if spec.rule == "delta":
            new = new - torch.einsum("rhkv,rhk->rhv", now, k[at])
        now.add_(k[at, :, :, None] * (strength[at] * new)[:, :, None])
        out[at] = torch.einsum("rhkv,rhk->rhv", now, q[at])
        after = step.rows.after[tokens]
        if (after >= 0).any():
            keep = torch.from_numpy(np.flatnonzero(after >= 0)).to(v.device)
            states[torch.from_numpy(after).to(v.device)[keep]] = now[keep]
    states[step.target] = state
    if weights.d is not None:
        out = out + weights.d[:, None] * v
    return out.flatten(1)
