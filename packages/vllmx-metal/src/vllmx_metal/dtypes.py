"""The dtypes that a model can be computed in, and arrays of a file as MLX's."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from vllmx_core.weights.tensor import RawTensor

DTYPES: Mapping[str, mx.Dtype] = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}


def to_mlx(raw: RawTensor) -> mx.array:
    """A copy of a dense tensor of one of `DTYPES`, in that dtype."""
    array = mx.array(np.ascontiguousarray(raw.view()))
    return array.view(mx.bfloat16) if raw.dtype == "bf16" else array
