"""Mixtures of experts in plain torch: the choice of experts, and their matrices one after the
other, each over the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec

from vllmx_torch.weights import LinearWeight


def route(
    logits: Tensor, spec: RouteSpec, bias: Tensor | None, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(T, X) float32 -> ids (T, k) int64, weights (T, k) float32; see `vllmx_core.ops.route`."""
    scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(dim=1)
    choice = scores if bias is None else scores + bias
    broken = choice.isnan().any(dim=1, keepdim=True)  # (T, 1)
    if spec.groups > 1:
        choice = choice.masked_fill(~_taking_part(choice, spec), -torch.inf)
    ids = _best(choice, spec.chosen)
    weights = scores.gather(1, ids)
    if spec.renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + spec.eps)
    weights = weights * spec.scale
    if factor is not None:
        weights = weights * factor[ids]
    return ids, weights.masked_fill(broken, torch.nan)


def _best(scores: Tensor, count: int) -> Tensor:
    """(T, count) indices by falling score, ties to the lower index, which `topk` does not say."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _taking_part(choice: Tensor, spec: RouteSpec) -> Tensor:
    """(T, X) whether an expert's group is one of the best."""
    grouped = choice.view(len(choice), spec.groups, -1)
    best = grouped.amax(2) if spec.group_score == "max" else grouped.topk(2, dim=2).values.sum(2)
    mask = torch.zeros_like(best, dtype=torch.bool)
    mask.scatter_(1, _best(best, spec.groups_kept), True)
    return mask.repeat_interleave(grouped.shape[2], dim=1)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    activated: Callable[[Tensor], Tensor],
) -> Tensor:
    """x (T, E) float32, ids and weights (T, k) -> (T, E): each chosen expert is read once."""
    tokens, slots = ids.shape
    pairs = ids.flatten().argsort(stable=True)  # (T * k,) of token and slot, expert by expert
    counts = ids.flatten().bincount(minlength=len(down.matrix)).tolist()
    said = x.new_empty(tokens * slots, x.shape[1])
    for expert, some in enumerate(pairs.split(counts)):
        if len(some):
            inner = activated(_product(x[some // slots], gate_up, expert))
            said[some] = _product(inner, down, expert)
    said = said.view(tokens, slots, -1)
    out = torch.zeros_like(x)
    for slot in range(slots):
        out.addcmul_(said[:, slot], weights[:, slot, None])
    return out


def _product(x: Tensor, stack: LinearWeight, expert: int) -> Tensor:
    matrix, bias = stack.matrix[expert], None if stack.bias is None else stack.bias[expert]
    return functional.linear(x.to(matrix.dtype), matrix, bias).float()


def clamped(gate_up: Tensor, spec: ExpertsSpec) -> Tensor:
    """(T, 2F) -> (T, F); see `ExpertsSpec.clamp`."""
    assert spec.clamp is not None
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
