"""Which form a part of a checkpoint gets."""

from __future__ import annotations

from vllmx_core.weights import WeightPart

from vllmx_cuda.matrices.dense import dense
from vllmx_cuda.matrices.form import Form, Kind, Target
from vllmx_cuda.matrices.gguf import gguf

KINDS: tuple[Kind, ...] = (gguf, dense)
"""Asked in this order; the last takes everything."""


def form_of(part: WeightPart, target: Target) -> Form:
    """The form of the first kind that knows the part."""
    found: Form = next(form for kind in KINDS if (form := kind(part, target)) is not None)
    return found
