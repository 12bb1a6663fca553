"""Stacks of matrices, such as the experts of a layer, out of matrices that were loaded alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import WeightSpec

from vllmx_metal.matrices import (
    DenseMatrix,
    Form,
    Matrix,
    QuantisedMatrix,
    StackedMatrix,
    joined,
    with_arrays,
)
from vllmx_metal.quantised import native_form


def forms_of(spec: WeightSpec, parts: Sequence[WeightPart]) -> list[Form | None]:
    """The form of each part of a weight. Parts at the same place of a stack's matrices are
    multiplied together: they have one form, and their columns lie in order, or are dequantised."""
    forms = [None if spec.offset else native_form(part) for part in parts]
    if spec.kind != "stack":
        return forms
    each = len(parts) // spec.count
    for place in range(each):
        orders = any(part.layout.options.get("act_order") for part in parts[place::each])
        if orders or len(set(forms[place::each])) > 1:
            forms[place::each] = [None] * spec.count
    return forms


def stack_of(spec: WeightSpec, matrices: Sequence[Matrix]) -> Matrix:
    """One stack out of the parts of its matrices; parts of one kind become one array."""
    each = len(matrices) // spec.count
    places = [_stack(matrices[place::each]) for place in range(each)]
    first = places[0]
    if isinstance(first, QuantisedMatrix):
        alike = all(first.joins(one) for one in places)
    else:
        alike = all(isinstance(one, DenseMatrix) for one in places)
    return joined(places, axis=1) if alike else StackedMatrix(tuple(places))


def _stack(matrices: Sequence[Matrix]) -> Matrix:
    """(X, out, in) of X matrices of one form."""
    equal = _with_equal_scales(matrices)
    return joined(
        [with_arrays(one, [array[None] for array in one.arrays]) for one in equal], axis=0
    )


def _with_equal_scales(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    """Scales that would be narrowed for some matrices alone are float32 for all."""
    found = [one for one in matrices if isinstance(one, QuantisedMatrix) and one.biases is not None]
    if len({one.scales.dtype for one in found}) < 2:
        return matrices
    return [
        replace(one, scales=one.scales.astype(mx.float32), biases=one.biases.astype(mx.float32))
        for one in found
        if one.biases is not None
    ]
