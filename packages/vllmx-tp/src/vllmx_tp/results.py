"""What the last stage of a model tells rank 0 of a step, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from vllmx_core.plan import AnyArray, LogprobRows, StepResult

_LOGPROBS = ("chosen", "rank", "top_ids", "top")
_OTHERS = ("ids", "logits", "vectors")


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_Arrays = dict[str, _Array]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Arrays)


def encode_result(result: StepResult) -> bytes:
    """Bytes of all of the result but the time, which rank 0 knows better."""
    found = {name: getattr(result, name) for name in _OTHERS}
    if result.logprobs is not None:
        found |= {name: getattr(result.logprobs, name) for name in _LOGPROBS}
    return _encoder.encode(
        {
            name: _Array(array.dtype.str, array.shape, array.tobytes())
            for name, array in found.items()
            if array is not None
        }
    )


def decode_result(data: bytes, elapsed_s: float) -> StepResult:
    """See `encode_result`."""
    found: dict[str, Any] = {name: _array(one) for name, one in _decoder.decode(data).items()}
    logprobs = None
    if "chosen" in found:
        logprobs = LogprobRows(*(found[name] for name in _LOGPROBS))
    return StepResult(
        found["ids"],
        logprobs,
        found.get("logits"),
        elapsed_s=elapsed_s,
        vectors=found.get("vectors"),
    )


def _array(one: _Array) -> AnyArray:
    return np.frombuffer(one.data, one.dtype).reshape(one.shape).copy()
