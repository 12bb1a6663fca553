"""The sampler's parameters of each row, as they lie among a step's arrays on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray, SamplingRows

PARAMETERS: dict[str, tuple[npt.DTypeLike, float]] = {
    "temperature": (np.float32, 0),
    "target": (np.int32, -1),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_x": (np.float32, -np.inf),
    "seed": (np.uint64, 0),
    "position": (np.int32, 0),
    "repetition_penalty": (np.float32, 1),
    "frequency_penalty": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "num_logprobs": (np.int32, -1),
}
"""Name -> type, and what a padding row has: a greedy one that nobody reads."""
_GREEDY = ("temperature", "target")


def parameter_bytes(name: str, rows: int) -> int:
    return np.dtype(PARAMETERS[name][0]).itemsize * rows


def is_plain(rows: SamplingRows) -> bool:
    """Whether ids depend on the logits and the parameters of each row alone, so that the launches
    are the same at every step."""
    return rows.edits is None and rows.counts is None and rows.masks is None


def read_parameters(rows: SamplingRows) -> Sequence[str]:
    """Parameters that the kernels of this step look at."""
    if rows.all_greedy and rows.max_logprobs < 0 and is_plain(rows):
        return _GREEDY
    return tuple(PARAMETERS)


def parameter(rows: SamplingRows, name: str) -> AnyArray:
    """(L,) as the kernels read it."""
    if name == "min_x":
        return _min_x(rows.min_p)
    values: AnyArray = getattr(rows, name)
    return values


def _min_x(min_p: F32) -> F32:
    """ln(min_p) as the reference rounds it; -inf: off."""
    with np.errstate(divide="ignore"):
        return np.log(min_p.astype(np.float64)).astype(np.float32)
