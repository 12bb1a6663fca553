"""Vectors that files of some architectures have otherwise than the originals: norms with something
added, decays already made."""

from __future__ import annotations

import numpy as np
from vllmx_core.weights.part import WeightPart, dense_part


def is_norm(name: str) -> bool:
    """True if a tensor of a file is the weight of a norm."""
    return name.endswith("norm.weight")


def shifted(part: WeightPart, offset: float) -> WeightPart:
    """A vector with `offset` added to each value."""
    if offset == 0:
        return part
    return dense_part(part.name, part.dequantize() + np.float32(offset))


def log_of_negated(part: WeightPart) -> WeightPart:
    """The logarithms of a vector's values times -1."""
    with np.errstate(all="ignore"):  # a damaged value is NaN, which the sampler reports
        return dense_part(part.name, np.log(-part.dequantize()))
