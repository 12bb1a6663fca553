"""The dtypes that a model can be computed in, and arrays of a file as MLX's."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from vllmx_core.errors import ConfigError
from vllmx_core.weights import RawTensor

DTYPES: Mapping[str, mx.Dtype] = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
_LONG_NAMES = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32",
}  # fmt: skip


def choose_dtype(wanted: str, automatic: str) -> str:
    """Raises ConfigError for one that is not of `DTYPES`."""
    name = automatic if wanted == "auto" else wanted
    name = _LONG_NAMES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(
            f"the metal backend has no dtype {name!r}: choose {', '.join(DTYPES)}", param="dtype"
        )
    return name


def to_mlx(raw: RawTensor) -> mx.array:
    """A copy of a dense tensor of one of `DTYPES`, in that dtype."""
    array = mx.array(np.ascontiguousarray(raw.view()))
    return array.view(mx.bfloat16) if raw.dtype == "bf16" else array
