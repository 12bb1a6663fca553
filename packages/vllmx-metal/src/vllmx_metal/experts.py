"""Mixtures of experts on MLX: the choice of experts, and products that gather their matrices."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec

from vllmx_metal.matrices import LinearWeight

SORTED_FROM = 64
"""Pairs of token and expert from which on it pays to bring those of an expert together."""


def route(
    logits: mx.array, spec: RouteSpec, bias: mx.array | None, factor: mx.array | None
) -> tuple[mx.array, mx.array]:
    """(T, X) -> ids (T, k) uint32, weights (T, k) float32; see `vllmx_core.ops.route`."""
    logits = logits.astype(mx.float32)
    scores = mx.sigmoid(logits) if spec.score == "sigmoid" else mx.softmax(logits, axis=1)
    choice = scores if bias is None else scores + bias
    broken = mx.isnan(choice).any(axis=1, keepdims=True)  # (T, 1)
    choice = mx.where(broken, 0.0, choice)
    if spec.groups > 1:
        choice = mx.where(_taking_part(choice, spec), choice, -mx.inf)
    ids = _best(choice, spec.chosen)
    weights = mx.take_along_axis(scores, ids, axis=1)
    if spec.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + spec.eps)
    weights = weights * spec.scale
    if factor is not None:
        weights = weights * factor[ids]
    return ids, mx.where(broken, mx.nan, weights)


def _best(scores: mx.array, count: int) -> mx.array:
    """(T, count) indices by falling score, ties to the lower index: a merge sort keeps the order
    of equals."""
    return mx.argsort(-scores, axis=1)[:, :count]


def _taking_part(choice: mx.array, spec: RouteSpec) -> mx.array:
    """(T, X) whether an expert's group is one of the best."""
    rows, count = choice.shape
    grouped = mx.sort(choice.reshape(rows, spec.groups, -1), axis=2)
    best = grouped[..., -1] if spec.group_score == "max" else grouped[..., -2:].sum(axis=2)
    mask = mx.zeros(best.shape, mx.bool_)
    mask = mx.put_along_axis(mask, _best(best, spec.groups_kept), mx.array(True), axis=1)
    return mx.repeat(mask, count // spec.groups, axis=1)


def experts(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    gate_up: LinearWeight,
    down: LinearWeight,
    activated: Callable[[mx.array], mx.array],
    dtype: mx.Dtype,
    here: mx.array | None = None,
) -> mx.array:
    """x (T, E), ids and weights (T, k) -> (T, E) of `dtype`. Slots that are not `here` (T, k) are
    not heard, whatever their expert says."""
    tokens, slots = ids.shape
    chosen, ordered = ids.flatten(), ids.size >= SORTED_FROM
    order = mx.argsort(chosen) if ordered else mx.arange(chosen.size)  # (T * k,)
    chosen = chosen[order]
    rows = x[order // slots][:, None]  # (T * k, 1, E)
    inner = activated(gate_up.multiply_each(rows, chosen, ordered=ordered).astype(dtype))
    said = down.multiply_each(inner, chosen, ordered=ordered).astype(mx.float32)[:, 0]
    if ordered:
        said = said[mx.argsort(order)]
    said = said.reshape(tokens, slots, -1)
    if here is not None:
        said = mx.where(here[..., None], said, 0.0)
    return (said * weights[..., None]).sum(axis=1).astype(dtype)


def clamped(gate_up: mx.array, spec: ExpertsSpec) -> mx.array:
    """(..., 2F) -> (..., F); see `ExpertsSpec.clamp`."""
    limit = spec.clamp
    assert limit is not None
    gate, up = mx.split(gate_up.astype(mx.float32), 2, axis=-1)
    gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return (gate * mx.sigmoid(spec.alpha * gate) * (up + 1)).astype(gate_up.dtype)
