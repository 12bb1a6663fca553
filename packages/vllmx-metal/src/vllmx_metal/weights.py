"""From a checkpoint to MLX arrays, one logical weight after the other."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from vllmx_core.memory import format_bytes
from vllmx_core.plan import AnyArray
from vllmx_core.weight_map import checked
from vllmx_core.weights import DENSE, PartSpec, WeightPart, WeightSource, WeightSpec

from vllmx_metal.dtypes import DTYPES, to_mlx
from vllmx_metal.matrices import DenseMatrix, LinearWeight, Matrix

logger = logging.getLogger("vllmx.metal")

MetalWeight = LinearWeight | Matrix | mx.array
"""Matrices to multiply, tables of embeddings, and vectors. Vectors and constants are float32."""


def weight_bytes(
    specs: Iterable[WeightSpec], constants: Mapping[str, AnyArray], dtype: mx.Dtype
) -> int:
    """Memory that `WeightLoader` will take for a map."""
    matrices: dict[_TieKey, int] = {}
    rest = sum(table.size * 4 for table in constants.values())
    for spec in specs:
        if spec.kind == "vector":
            rest += spec.rows * 4
            continue
        has_bias = spec.kind == "linear" and any(part.bias is not None for part in spec.parts)
        rest += spec.rows * dtype.size * has_bias
        matrices[_tie_key(spec)] = spec.rows * spec.cols * dtype.size
    return sum(matrices.values()) + rest


@dataclass
class WeightLoader:
    """Loads a weight map. `load` raises WeightFormatError that names the tensor when one is missing
    or has another shape than the map says."""

    source: WeightSource
    dtype: mx.Dtype
    _matrices: dict[_TieKey, Matrix] = field(default_factory=dict)
    _dequantised: Counter[str] = field(default_factory=Counter)

    def load(
        self, specs: Sequence[WeightSpec], constants: Mapping[str, AnyArray], *, progress: bool
    ) -> dict[str, MetalWeight]:
        weights: dict[str, MetalWeight] = {}
        for index, spec in enumerate(specs):
            weights[spec.name] = self._weight(spec)
            if progress:
                _show(index + 1, len(specs))
        for name, table in constants.items():
            weights[name] = mx.array(np.array(table, np.float32))
        for kind, elements in self._dequantised.items():
            size = format_bytes(elements * self.dtype.size)
            logger.info("%s weights are dequantised at load and take %s", kind, size)
        return weights

    def _weight(self, spec: WeightSpec) -> MetalWeight:
        if spec.kind == "vector":
            parts = [self._part(part, (), spec.offset, mx.float32) for part in spec.parts]
            return self._joined(parts)
        key = _tie_key(spec)
        if key not in self._matrices:  # a head that is tied to the embedding is held once
            parts = [self._part(part, (spec.cols,), spec.offset, self.dtype) for part in spec.parts]
            self._matrices[key] = DenseMatrix(self._joined(parts))
        if spec.kind == "embedding":
            return self._matrices[key]
        return LinearWeight(self._matrices[key], self._bias(spec))

    def _bias(self, spec: WeightSpec) -> mx.array | None:
        if all(part.bias is None for part in spec.parts):
            return None
        pieces = [
            mx.zeros(part.rows, self.dtype)
            if part.bias is None
            else self._dense(checked(self.source.part(part.bias), (part.rows,)), 0.0, self.dtype)
            for part in spec.parts
        ]
        return self._joined(pieces)

    def _part(
        self, part: PartSpec, cols: tuple[int, ...], offset: float, dtype: mx.Dtype
    ) -> mx.array:
        found = checked(self.source.part(part.name), (part.rows, *cols))
        return self._dense(found, offset, dtype)

    def _dense(self, part: WeightPart, offset: float, dtype: mx.Dtype) -> mx.array:
        plain = part.layout == DENSE and part.decode is None and not offset
        if plain and part.buffers["weight"].dtype in DTYPES:
            array = to_mlx(part.buffers["weight"]).reshape(part.shape)
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


_TieKey = tuple[tuple[PartSpec, ...], float]


def _tie_key(spec: WeightSpec) -> _TieKey:
    """Equal for specs that one matrix serves."""
    return spec.parts, spec.offset


def _show(done: int, total: int) -> None:
    share = done / total
    end = "\n" if done == total else ""
    sys.stderr.write(f"\rloading weights [{'#' * int(share * 30):<30}] {share:4.0%}{end}")
