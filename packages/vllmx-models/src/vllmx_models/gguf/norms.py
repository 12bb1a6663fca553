"""Weights of norms, which files of some architectures have with something added."""

from __future__ import annotations

import numpy as np
from vllmx_core.weights import DENSE, RawTensor, WeightPart


def is_norm(name: str) -> bool:
    """Whether a tensor of a file is the weight of a norm."""
    return name.endswith("norm.weight")


def shifted(part: WeightPart, offset: float) -> WeightPart:
    """A vector with `offset` added to each value."""
    if offset == 0:
        return part
    values = part.dequantize() + np.float32(offset)
    raw = RawTensor(part.name, "f32", values.shape, values.view(np.uint8))
    return WeightPart(part.name, values.shape, DENSE, {"weight": raw})
