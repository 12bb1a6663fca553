"""Loads a checkpoint into MLX arrays, one logical weight after the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from vllmx_core.plan import AnyArray
from vllmx_core.system.memory import format_bytes
from vllmx_core.system.progress import show_progress
from vllmx_core.weights.map import TieKey, bias_of, has_bias, parts_of, tie_key
from vllmx_core.weights.part import DENSE, WeightPart, WeightSource, is_plain
from vllmx_core.weights.spec import WeightSpec

from vllmx_metal.arrays import DTYPES, to_mlx
from vllmx_metal.matrices import (
    DenseMatrix,
    Form,
    LinearWeight,
    Matrix,
    QuantisedMatrix,
    StackedMatrix,
    joined,
    stacked,
    with_arrays,
)
from vllmx_metal.quantised import native_form, quantised_matrix

logger = logging.getLogger("vllmx.metal")

MetalWeight = LinearWeight | Matrix | mx.array
"""Matrices to multiply, tables of embeddings, and vectors. Vectors and constants are float32."""


def planned_bytes(
    specs: Iterable[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    dtype: mx.Dtype,
    shared: Collection[TieKey] = (),
) -> int:
    """The most that `WeightLoader` will take for a map, but for matrices that are shared, known
    before anything is read. Raises WeightFormatError as it would."""
    matrices: dict[TieKey, int] = {}
    rest = sum(table.size * 4 for table in constants.values())
    for spec in specs:
        if spec.kind == "vector":
            rest += spec.rows * 4
            continue
        rest += spec.rows * spec.count * dtype.size * has_bias(spec)
        parts = parts_of(spec, source)
        forms = zip(parts, forms_of(spec, parts), strict=True)
        matrices[tie_key(spec)] = sum(_matrix_bytes(part, form, dtype) for part, form in forms)
    return sum(size for key, size in matrices.items() if key not in shared) + rest


def _matrix_bytes(part: WeightPart, form: Form | None, dtype: mx.Dtype) -> int:
    rows, cols = part.shape
    return rows * cols * dtype.size if form is None else form.num_bytes(rows, cols)


def held_bytes(weights: Mapping[str, MetalWeight]) -> int:
    """Bytes of all arrays, each counted once."""
    arrays: dict[int, mx.array] = {}
    for weight in weights.values():
        held: tuple[mx.array, ...]
        if isinstance(weight, mx.array):
            held = (weight,)
        elif isinstance(weight, LinearWeight):
            held = (*weight.matrix.arrays, *(() if weight.bias is None else (weight.bias,)))
        else:
            held = weight.arrays
        arrays |= {id(array): array for array in held}
    return sum(array.nbytes for array in arrays.values())


@dataclass
class WeightLoader:
    """Loads a weight map. `load` raises WeightFormatError that names the tensor when one is missing
    or has another shape than the map says."""

    source: WeightSource
    dtype: mx.Dtype
    matrices: dict[TieKey, Matrix] = field(default_factory=dict)
    """Loaded ones; at first those of another model, which are shared."""
    _dequantised: Counter[str] = field(default_factory=Counter)

    def load(
        self, specs: Sequence[WeightSpec], constants: Mapping[str, AnyArray], *, progress: bool
    ) -> dict[str, MetalWeight]:
        weights: dict[str, MetalWeight] = {}
        for index, spec in enumerate(specs):
            weights[spec.name] = self._weight(spec)
            if progress:
                show_progress("loading weights", index + 1, len(specs))
        for name, table in constants.items():
            weights[name] = mx.array(np.array(table, np.float32))
        for kind, elements in self._dequantised.items():
            size = format_bytes(elements * self.dtype.size)
            logger.info("%s weights are dequantised at load and take %s", kind, size)
        return weights

    def _weight(self, spec: WeightSpec) -> MetalWeight:
        if spec.kind == "vector":
            found = parts_of(spec, self.source)
            return self._joined([self._dense(part, spec.offset, mx.float32) for part in found])
        key = tie_key(spec)
        if key not in self.matrices:  # a head that is tied to the embedding is held once
            parts = parts_of(spec, self.source)
            forms = zip(parts, forms_of(spec, parts), strict=True)
            made = [self._matrix(part, form, spec.offset) for part, form in forms]
            whole = stack_of(spec, made) if spec.kind == "stack" else stacked(made)
            self.matrices[key] = whole
            mx.eval(self.matrices[key].arrays)  # what they were made of is freed
        if spec.kind == "embedding":
            return self.matrices[key]
        return LinearWeight(self.matrices[key], self._bias(spec))

    def _bias(self, spec: WeightSpec) -> mx.array | None:
        bias = bias_of(spec, self.source)
        if bias is None:
            return None
        shape = (spec.count, spec.rows) if spec.kind == "stack" else (spec.rows,)
        return mx.array(bias).astype(self.dtype).reshape(shape)

    def _matrix(self, part: WeightPart, form: Form | None, offset: float) -> Matrix:
        if form is not None:
            matrix = quantised_matrix(part, form, self.dtype)
            mx.eval(matrix.arrays)
            return matrix
        return DenseMatrix(self._dense(part, offset, self.dtype))

    def _dense(self, part: WeightPart, offset: float, dtype: mx.Dtype) -> mx.array:
        raw = part.stored().buffers["weight"] if is_plain(part) and not offset else None
        if raw is not None and raw.dtype in DTYPES:
            array = to_mlx(raw).reshape(part.shape)
        else:
            if part.layout != DENSE:
                self._dequantised[part.layout.kind] += int(np.prod(part.shape))
            array = mx.array(part.dequantize() + np.float32(offset))
        return array.astype(dtype)

    def _joined(self, pieces: list[mx.array]) -> mx.array:
        """One below the other, computed now: what they were made of is freed."""
        array = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
        mx.eval(array)
        return array


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
