"""Recurrent layers in plain torch: all rows of a step side by side, token after token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.ops.recurrence import RecurrenceSpec, RecurrenceWeights
from vllmx_core.ops.short_conv import ShortConvSpec

from vllmx_torch.step import TorchStep
from vllmx_torch.transfer import upload


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the rows of a step keep their states, and which of them still have tokens.

    Rows are sorted by length, the longest first, so that those with a token at an offset are the
    first ones.
    """

    lengths: list[int]
    first: Tensor  # (R,) index of each row's first token
    source: Tensor  # (R,) slot, -1 for a row that begins
    target: Tensor  # (R,) slot

    @classmethod
    def of(cls, step: TorchStep) -> StateRows:
        """The rows of a step."""
        plan, lengths = step.plan, np.diff(step.plan.query_start)
        slots = plan.state_from, plan.state_to
        assert slots[0] is not None, "a plan for a model with states names their slots"
        assert slots[1] is not None, "a plan for a model with states names their slots"
        order = np.argsort(-lengths, kind="stable")
        packed = np.stack([plan.query_start[:-1], slots[0], slots[1]])[:, order]
        first, source, target = upload(packed, np.int64, step.tokens.device)
        return cls(lengths[order].tolist(), first, source, target)

    def before(self, states: Tensor) -> Tensor:
        """(R, ...) out of (slots, ...): a copy, zeros for rows that begin."""
        found = states[self.source.clamp(min=0)]
        return torch.where(self.source.view(-1, *[1] * (found.ndim - 1)) < 0, 0.0, found)

    def tokens(self) -> Iterator[tuple[int, Tensor]]:
        """For each offset in the rows: how many rows have a token there, and which ones (n,)."""
        rows = len(self.lengths)
        for offset in range(self.lengths[0]):
            while self.lengths[rows - 1] <= offset:
                rows -= 1
            yield rows, self.first[:rows] + offset


def short_conv(
    x: Tensor, w: Tensor, bias: Tensor | None, spec: ShortConvSpec, rows: StateRows, states: Tensor
) -> Tensor:
    """(T, C) -> (T, C), over and into the states (slots, 1, K - 1, C)."""
    taps, out = w.view(-1, spec.kernel).T, torch.empty_like(x)  # (K, C)
    seen = rows.before(states)[:, 0]  # (R, K - 1, C)
    for count, tokens in rows.tokens():
        window = torch.cat([seen[:count], x[tokens][:, None]], dim=1)  # (n, K, C)
        out[tokens] = (window * taps).sum(1)
        seen[:count] = window[:, 1:]
    states[rows.target, 0] = seen
    out = out if bias is None else out + bias
    return out if spec.activation is None else functional.silu(out)


def recurrence(
    qkv: Tensor,
    a: Tensor,
    b: Tensor | None,
    spec: RecurrenceSpec,
    weights: RecurrenceWeights[Tensor],
    rows: StateRows,
    states: Tensor,
) -> Tensor:
    """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv), over and into the states (slots, H, Dk, Dv)."""
    q, k, v = _split(qkv, spec)
    dt = functional.softplus(a + weights.dt_bias).view(len(a), spec.num_heads, -1)
    dt = dt.clamp(spec.dt_min, spec.dt_max)
    decay = torch.exp(-weights.a_log.exp()[:, None] * dt)  # (T, H, Dk or 1)
    strength = dt if b is None else b.sigmoid()[:, :, None]  # (T, H, 1)
    state, out = rows.before(states), torch.empty_like(v)  # (R, H, Dk, Dv), (T, H, Dv)
    for count, at in rows.tokens():
        now = state[:count].mul_(decay[at, :, :, None])
        new = v[at]
        if spec.rule == "delta":
            new = new - torch.einsum("rhkv,rhk->rhv", now, k[at])
        now.add_(k[at, :, :, None] * (strength[at] * new)[:, :, None])
        out[at] = torch.einsum("rhkv,rhk->rhv", now, q[at])
    states[rows.target] = state
    if weights.d is not None:
        out = out + weights.d[:, None] * v
    return out.flatten(1)


def _split(qkv: Tensor, spec: RecurrenceSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q and k (T, H, Dk) of each head, normed and scaled as the rule says, and v (T, H, Dv)."""
    keys = spec.num_key_heads * spec.key_size
    q, k, v = qkv.split([keys, keys, spec.num_heads * spec.value_size], dim=1)
    q, k = (part.unflatten(1, (spec.num_key_heads, spec.key_size)) for part in (q, k))
    if spec.rule == "delta":
        q, k = (
            part * torch.rsqrt(part.square().sum(-1, keepdim=True) + spec.norm_eps)
            for part in (q, k)
        )
    heads = torch.arange(spec.num_heads, device=qkv.device)
    shared = spec.num_heads // spec.num_key_heads
    source = heads % spec.num_key_heads if spec.tiled else heads // shared
    return q[:, source] * spec.scale, k[:, source], v.unflatten(1, (spec.num_heads, -1))
