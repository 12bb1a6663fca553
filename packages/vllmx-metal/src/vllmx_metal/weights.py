"""Loads a checkpoint into MLX arrays, one logical weight after the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from vllmx_core.plan import AnyArray
from vllmx_core.system.memory import format_bytes
from vllmx_core.system.progress import show_progress
from vllmx_core.weights.map import TieKey, bias_of, has_bias, parts_of, tie_key
from vllmx_core.weights.part import DENSE, WeightPart, WeightSource, is_plain
from vllmx_core.weights.spec import WeightSpec

from vllmx_metal.arrays import DTYPES, to_mlx
from vllmx_metal.matrices import DenseMatrix, Form, LinearWeight, Matrix, stacked
from vllmx_metal.quantised import quantised_matrix
from vllmx_metal.stacks import forms_of, stack_of

logger = logging.getLogger("vllmx.metal")

MetalWeight = LinearWeight | Matrix | mx.array
"""Matrices to multiply, tables of embeddings, and vectors. Vectors and constants are float32."""


def planned_bytes(
    specs: Iterable[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    dtype: mx.Dtype,
) -> int:
    """The most that `WeightLoader` will take for a map, known before anything is read. Raises
    WeightFormatError as it would."""
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
    return sum(matrices.values()) + rest


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
    _matrices: dict[TieKey, Matrix] = field(default_factory=dict)
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
        if key not in self._matrices:  # a head that is tied to the embedding is held once
            parts = parts_of(spec, self.source)
            forms = zip(parts, forms_of(spec, parts), strict=True)
            made = [self._matrix(part, form, spec.offset) for part, form in forms]
            whole = stack_of(spec, made) if spec.kind == "stack" else stacked(made)
            self._matrices[key] = whole
            mx.eval(self._matrices[key].arrays)  # what they were made of is freed
        if spec.kind == "embedding":
            return self._matrices[key]
        return LinearWeight(self._matrices[key], self._bias(spec))

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
