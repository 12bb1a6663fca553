"""Matrices as MLX multiplies them: dense, or packed integers with a scale for each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


class Matrix(Protocol):
    """(out, in)."""

    def multiply(self, x: mx.array) -> mx.array:
        """x (..., in) -> (..., out) in the model's dtype."""
        ...

    def rows(self, ids: mx.array) -> mx.array:
        """(T,) -> (T, in) in the model's dtype."""
        ...

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: mx.array  # (out, in)

    def multiply(self, x: mx.array) -> mx.array:
        return x.astype(self.weight.dtype) @ self.weight.T

    def rows(self, ids: mx.array) -> mx.array:
        return self.weight[ids]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices of different kinds, one below the other: a fused weight whose parts were quantised
    differently."""

    parts: tuple[Matrix, ...]

    def multiply(self, x: mx.array) -> mx.array:
        return mx.concatenate([part.multiply(x) for part in self.parts], axis=-1)

    def rows(self, ids: mx.array) -> mx.array:
        raise AssertionError("a table of embeddings has one part")

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(array for part in self.parts for array in part.arrays)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What `Ops.linear` and `Ops.logits` get."""

    matrix: Matrix
    bias: mx.array | None  # (out,)

    def multiply(self, x: mx.array) -> mx.array:
        """x (T, in) -> (T, out)."""
        product = self.matrix.multiply(x)
        return product if self.bias is None else product + self.bias
