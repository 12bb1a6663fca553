"""From a model's weight map and a checkpoint to plain float32 arrays."""

from __future__ import annotations

import numpy as np

from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights import PartSpec, WeightPart, WeightSource, WeightSpec

TieKey = tuple[tuple[PartSpec, ...], float]


def tie_key(spec: WeightSpec) -> TieKey:
    """Equal for specs that one matrix serves, such as an embedding and the head that is tied to
    it."""
    return spec.parts, spec.offset


def assemble(spec: WeightSpec, source: WeightSource) -> tuple[F32, F32 | None]:
    """The logical weight, (rows, cols) or a vector's (rows,), and its bias (rows,) or None; parts
    without a bias beside others with one get zeros. Raises WeightFormatError for a tensor that is
    missing or has another shape than the map says."""
    tensors, biases = [], []
    for part in spec.parts:
        shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
        tensors.append(checked(source.part(part.name), shape).dequantize())
        if part.bias is None:
            biases.append(np.zeros(part.rows, np.float32))
        else:
            biases.append(checked(source.part(part.bias), (part.rows,)).dequantize())
    weight = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    if spec.offset:
        weight = weight + np.float32(spec.offset)
    has_bias = any(part.bias is not None for part in spec.parts)
    return weight, np.concatenate(biases) if has_bias else None


def checked(part: WeightPart, shape: tuple[int, ...]) -> WeightPart:
    """The part itself. Raises WeightFormatError when its shape is not `shape`."""
    if part.shape != shape:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, the model's config asks for"
            f" {list(shape)}: config.json and weights do not belong together"
        )
    return part
