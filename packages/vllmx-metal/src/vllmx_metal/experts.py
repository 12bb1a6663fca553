"""Mixtures of experts on MLX: products that gather their matrices."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from vllmx_metal.matrices import LinearWeight

SORTED_FROM = 64
"""Pairs of token and expert from which on it pays to bring those of an expert together."""


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
