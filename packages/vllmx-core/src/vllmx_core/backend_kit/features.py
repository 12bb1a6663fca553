"""Size of the store for image features."""

from __future__ import annotations

from vllmx_core.backend import LoadOptions
from vllmx_core.model import ModelShape


def feature_rows(shape: ModelShape, options: LoadOptions) -> int:
    """Tokens whose features it holds: as many as its memory does, and at least a step's."""
    if shape.features is None:
        return 0
    least = min(options.max_num_batched_tokens, options.max_model_len)
    return max(least, options.encoder_cache_bytes // shape.features.row_bytes)


def feature_bytes(shape: ModelShape, options: LoadOptions) -> int:
    """Bytes that the store of features takes on the device."""
    if shape.features is None:
        return 0
    return feature_rows(shape, options) * shape.features.row_bytes


def feature_shapes(shape: ModelShape, options: LoadOptions) -> list[tuple[int, int]]:
    """(rows, width) of each part."""
    if shape.features is None:
        return []
    return [(feature_rows(shape, options), shape.features.width)] * shape.features.parts
