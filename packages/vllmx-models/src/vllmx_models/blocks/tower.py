"""Parts shared by the vision towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from vllmx_core.model import Array, Ops, Weight
from vllmx_core.plan import I32
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part, vector


def merge_order(tall: int, wide: int, merge: int) -> tuple[I32, I32]:
    """(N,) row and column of each patch, ordered so that merge x merge neighbours are adjacent."""
    places = np.arange(tall * wide, dtype=np.int32).reshape(
        tall // merge, merge, wide // merge, merge
    )
    order = places.transpose(0, 2, 1, 3).reshape(-1)
    return order // np.int32(wide), order % np.int32(wide)


def norm(name: str, source: str, size: int) -> tuple[WeightSpec, WeightSpec]:
    """The weight and the bias of a layer norm."""
    scale = vector(name, f"{source}.weight", size)
    return scale, vector(f"{name}.bias", f"{source}.bias", size)


def normed(ops: Ops, x: Array, w: Mapping[str, Weight], name: str, eps: float) -> Array:
    """Records the layer norm of x with the weights that `norm` lists."""
    return ops.layer_norm(x, w[name], w[f"{name}.bias"], eps)


def linear(name: str, source: str, rows: int, cols: int, *, bias: bool = True) -> WeightSpec:
    """A matrix of a tower; towers are not sharded."""
    return WeightSpec(name, "linear", (part(source, rows, bias=bias),), cols)


def prefixed(spec: WeightSpec, prefix: str, others: tuple[str, ...]) -> WeightSpec:
    """Adds alternative names with each of the `others` in place of `prefix`."""
    return replace(spec, parts=tuple(_prefixed(one, prefix, others) for one in spec.parts))


def _prefixed(one: PartSpec, prefix: str, others: tuple[str, ...]) -> PartSpec:
    name = one.name.removeprefix(prefix)
    return replace(one, alternatives=tuple(other + name for other in others))
