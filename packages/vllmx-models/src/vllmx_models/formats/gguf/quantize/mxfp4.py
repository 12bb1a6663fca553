"""Converts matrices that a checkpoint stores in MXFP4 to GGUF blocks, without loss.

Both have 32 e2m1 values with one exponent. A checkpoint packs neighbours into a byte and stores
exponents separately; a GGUF block has the exponent, then values i and i + 16 in each byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.encoding import Encoded
from vllmx_core.weights.part import WeightPart

from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME

MXFP4 = "MXFP4"
_NAN = 255
"""The exponent of a block of NaNs."""


def is_kept(parts: Sequence[WeightPart], kind: str) -> bool:
    """True if a tensor stays in MXFP4 although a mix gives it the type `kind`: a type of as many
    bits or more would only add bytes."""
    block = TYPES_BY_NAME[MXFP4]
    bits = block.num_bytes * 8 / block.values
    asked = TYPES_BY_NAME[kind]
    return asked.num_bytes * 8 / asked.values >= bits and all(_is_stored(part) for part in parts)


def _is_stored(part: WeightPart) -> bool:
    layout = part.layout
    if layout.gguf_type is not None:
        return layout.gguf_type == MXFP4
    alone = layout.options.get("global_scale") == "none"
    return layout.kind == "fp4" and layout.group_size == 32 and alone


def stored_blocks(parts: Sequence[WeightPart], begin: int, end: int) -> Encoded:
    """The concatenated blocks of whole matrices. Raises WeightFormatError for invalid exponents."""
    return Encoded(np.concatenate([_blocks(part) for part in parts[begin:end]]))


def _blocks(part: WeightPart) -> npt.NDArray[np.uint8]:
    buffers = part.stored().buffers
    weight = buffers["weight"]
    if part.layout.gguf_type is not None:
        blocks = weight.data.reshape(-1, TYPES_BY_NAME[MXFP4].num_bytes)
        exponents = blocks[:, :1]
    else:
        scale = buffers["scale"]
        if scale.dtype not in ("u8", "f8e8m0"):
            raise WeightFormatError(
                f"tensor {part.name!r} has groups of 32 with scales of {scale.dtype}, MXFP4 has"
                " exponents: convert the checkpoint from its unquantised form"
            )
        exponents = scale.data.reshape(-1, 1)
        packed = weight.data.reshape(-1, 16)
        values = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1, 32)
        blocks = np.concatenate((exponents, values[:, :16] | values[:, 16:] << 4), axis=1)
    if (exponents == _NAN).any():
        raise WeightFormatError(
            f"tensor {part.name!r} has a value that is not finite, which {MXFP4} cannot express:"
            " repair the checkpoint"
        )
    return blocks.reshape(-1)
