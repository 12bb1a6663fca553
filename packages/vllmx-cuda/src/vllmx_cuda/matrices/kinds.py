"""Chooses the form of a part of a checkpoint."""

from __future__ import annotations

from vllmx_core.weights.part import WeightPart

from vllmx_cuda.matrices.codes8 import codes8
from vllmx_cuda.matrices.dense import dense
from vllmx_cuda.matrices.form import Form, Kind, Target
from vllmx_cuda.matrices.gguf import gguf
from vllmx_cuda.matrices.w4 import w4

KINDS: tuple[Kind, ...] = (codes8, w4, gguf, dense)
"""Asked in this order; the last takes everything."""


def form_of(part: WeightPart, target: Target, *, gathered: bool = False) -> Form:
    """The form of the first kind that knows the part; `gathered`: and that can gather its rows."""
    forms = (form for kind in KINDS if (form := kind(part, target)) is not None)
    found: Form = next(form for form in forms if form.gathers or not gathered)
    return found
