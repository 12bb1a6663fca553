"""Many log-probabilities of one token, out of all its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllmx_core.plan import F32, U32

_SIGN = np.uint32(1 << 31)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def likeliest(logits: F32, token: int, logprob: float, count: int) -> bytes:
    """`TokenLogprobs.packed` of the `count` likeliest ids, the lowest id first at a tie.

    Args:
        logits: (V,), as computed.
        token: one whose log-probability is known, `logprob`: all others follow from it.
    """
    keys = (_descending(logits).astype(np.uint64) << _SHIFT) | np.arange(
        logits.size, dtype=np.uint64
    )
    if count < keys.size:
        keys = np.partition(keys, count)[:count]
    keys.sort()
    ids = (keys & _LOW).astype("<i4")
    shift = float(logits[token]) - logprob
    values = (logits[ids].astype(np.float64) - shift).astype("<f4")
    return b"".join((ids.tobytes(), values.tobytes()))


def logprobs_of(logits: F32, token: int, logprob: float, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of these ids; arguments as for `likeliest`."""
    shift = float(logits[token]) - logprob
    values = logits[np.array(ids, np.int64)].astype(np.float64) - shift
    found: list[float] = values.astype(np.float32).tolist()
    return found


def _descending(logits: F32) -> U32:
    """(V,) integers in the reverse order of the logits; of equal ones, -0 and 0 among them, too."""
    bits = (logits + np.float32(0)).view(np.uint32)
    ascending = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    found: U32 = ~ascending
    return found
