"""Limits of a step, the size of the store for image features, and the check that weights fit."""

from __future__ import annotations

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.model import ModelShape
from vllmx_core.ops.values import Rows
from vllmx_core.system.memory import FREE_MEMORY, format_bytes, remedy_for

LOGITS_BYTES = 256 << 20
"""Logits beyond one row a sequence (prompt logprobs) grow to this size."""


def step_limits(
    options: LoadOptions, vocab_size: int, *, num_seqs: int | None = None, multiple: int = 1
) -> dict[Rows, int]:
    """The greatest T and L of a step.

    Args:
        num_seqs: sequences that run together, where that is not `options.num_seqs`.
        multiple: both are rounded up to a multiple of it, for kernels that pad rows.
    """
    sequences = num_seqs or options.num_seqs
    tokens = max(options.max_num_batched_tokens, sequences)
    rows = min(tokens, max(sequences, LOGITS_BYTES // (4 * vocab_size)))
    return {"T": -(-tokens // multiple) * multiple, "L": -(-rows // multiple) * multiple}


def check_weights_fit(
    num_bytes: int, free: int, dtype: str, *, where: str = "", remedy: str
) -> None:
    """Raises CapacityError, before anything is read, for weights larger than the free memory;
    `where` begins with a space and names the memory."""
    if num_bytes > free:
        limit = remedy_for(free)
        more = "" if limit == FREE_MEMORY else f", or {limit}"
        raise CapacityError(
            f"the weights take {format_bytes(num_bytes)} as {dtype}, {format_bytes(free)} of memory"
            f" are free{where}: {remedy}{more}"
        )


def feature_rows(shape: ModelShape, options: LoadOptions) -> int:
    """Tokens in the store for image features: as many as fit its memory, and at least a step's. In
    an encoder-decoder whole inputs, and at least four."""
    if shape.features is None:
        return 0
    if crossed := shape.features.crossed:
        fitting = options.encoder_cache_bytes // (shape.features.row_bytes * crossed)
        return crossed * max(4, min(fitting, 2 * options.num_seqs))
    least = min(options.max_num_batched_tokens, options.max_model_len)
    return max(least, options.encoder_cache_bytes // shape.features.row_bytes)


def feature_bytes(shape: ModelShape, options: LoadOptions) -> int:
    """Bytes of the feature store on the device."""
    return sum(4 * rows * width for rows, width in feature_shapes(shape, options))


def feature_shapes(shape: ModelShape, options: LoadOptions) -> list[tuple[int, int]]:
    """(rows, width) of each part of the feature store: those of images, with a row for features
    that are dropped, then those of taps."""
    found: list[tuple[int, int]] = []
    if shape.features is not None:
        size = (feature_rows(shape, options) + 1, shape.features.width)
        found += [size] * shape.features.parts
    if shape.taps is not None:
        found += shape.taps.shapes(shape.hidden_size)
    return found
