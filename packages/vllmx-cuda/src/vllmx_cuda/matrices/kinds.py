"""Chooses the form of a part of a checkpoint, and of a stack of experts' matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllmx_core.weights.part import WeightPart

from vllmx_cuda.kernel_specs import has_tensor_cores
from vllmx_cuda.kernel_specs.linear import MMA_K
from vllmx_cuda.matrices.codes8 import Codes8, codes8
from vllmx_cuda.matrices.dense import dense
from vllmx_cuda.matrices.form import Form, Kind, Target
from vllmx_cuda.matrices.gguf import expert_blocks, gguf
from vllmx_cuda.matrices.w4 import W4, w4

KINDS: tuple[Kind, ...] = (codes8, w4, gguf, dense)
"""Asked in this order; the last takes everything."""


def form_of(part: WeightPart, target: Target, *, gathered: bool = False) -> Form:
    """The form of the first kind that knows the part; `gathered`: and that can gather its rows."""
    forms = (form for kind in KINDS if (form := kind(part, target)) is not None)
    found: Form = next(form for form in forms if form.gathers or not gathered)
    return found


def expert_form(parts: Sequence[WeightPart], target: Target) -> Form | None:
    """The form that kernels multiply the experts in; None: dequantised, for there is no such
    kernel, or they are not all alike."""
    found = _form_of(parts[0], target)
    if found is None or any(_form_of(part, target) != found for part in parts[1:]):
        return None
    return found


def _form_of(part: WeightPart, target: Target) -> Form | None:
    blocks = expert_blocks(part, target)
    if blocks is not None:
        return blocks
    # Sizes that either stack can have, whatever form the other one gets
    whole = part.shape[0] % MMA_K == 0 and part.shape[1] % MMA_K == 0
    if not whole or not has_tensor_cores(target.dtype, target.arch):
        return None
    return _codes(part, target) or _integers(part, target)


def _codes(part: WeightPart, target: Target) -> Codes8 | None:
    """FP8, whose activations stay as they are."""
    found = codes8(part, target)
    if found is None or not found.meets_tensor_cores(part.shape[1], target):
        return None
    return replace(found, coded_products=False, x_scale=0.0)


def _integers(part: WeightPart, target: Target) -> W4 | None:
    """The form of integers with columns in the order of their groups, one for all experts."""
    found = None if part.layout.gguf_type is not None else w4(part, target)
    return None if found is None or found.packing.order else found
