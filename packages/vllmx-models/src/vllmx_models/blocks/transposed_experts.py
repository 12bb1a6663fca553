"""Transposes experts that are stored with their input features first, for quantisation in blocks.

Blocks and scales run along the input features, so each matrix becomes a separate tensor with its
output features first, under the weight map's name for that layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from vllmx_core.weights.map import bias_parts, choices, parts_of, resolved
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource
from vllmx_core.weights.spec import PartSpec, WeightSpec


class UprightExperts(SourceOver):
    """A `WeightSource` that renames some matrices and their biases."""

    def __init__(self, source: WeightSource, matrices: Mapping[str, WeightSpec]) -> None:
        """`matrices` maps each new name to the spec that reads the matrix from the source."""
        self._source = source
        self._matrices = matrices
        self._biases = {_bias_of(name): spec for name, spec in matrices.items()}
        stored = [part for spec in matrices.values() for part in spec.parts]
        if all(part.bias is None for part in stored):
            self._biases = {}
        hidden = {name for part in stored for name in (part.name, part.bias)}
        self._names = {*source.names(), *matrices, *self._biases} - hidden

    def names(self) -> Collection[str]:
        """All names except those of transposed tensors."""
        return self._names

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError as `vllmx_core.weights.map.parts_of`."""
        if (spec := self._matrices.get(name)) is not None:
            (part,) = parts_of(spec, self._source)
            return replace(part, name=name)
        if (spec := self._biases.get(name)) is not None:
            (bias,) = bias_parts(spec, self._source)
            assert bias is not None, name
            return replace(bias, name=name)
        return self._source.part(name)


def upright(source: WeightSource, specs: Iterable[WeightSpec]) -> WeightSource:
    """Returns the source, wrapped if it stores matrices of `specs` transposed and the map knows
    another layout of them."""
    found: dict[str, WeightSpec] = {}
    for spec in specs:
        for part in spec.parts:
            if lies_across(source, part, spec.cols) and (other := _upright_form(part)):
                found[other.name] = WeightSpec(
                    other.name, "linear", (resolved(source, part),), spec.cols
                )
    return UprightExperts(source, found) if found else source


def lies_across(source: WeightSource, part: PartSpec, cols: int) -> bool:
    """True if the tensor has its input features first."""
    found = resolved(source, part)
    if found.transposed is None:
        return source.part(found.name).shape[-1] != cols
    return found.transposed


def _upright_form(part: PartSpec) -> PartSpec | None:
    """The map's layout in which the matrix is a separate tensor."""
    forms = (one for one in choices(part) if one.transposed is False and one.entry is None)
    return next(forms, None)


def _bias_of(matrix: str) -> str:
    return f"{matrix.removesuffix('.weight')}.bias"
