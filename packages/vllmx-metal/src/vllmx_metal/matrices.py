"""Matrices as MLX multiplies them: dense, or packed integers with a scale for each group. A stack
of X equal matrices is of the same classes, with an axis of X in front of each array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx


class Matrix(Protocol):
    """(out, in)."""

    def multiply(self, x: mx.array) -> mx.array:
        """x (..., in) -> (..., out), in the model's dtype or, where more is known, float32."""
        ...

    def multiply_each(self, x: mx.array, ids: mx.array, *, ordered: bool) -> mx.array:
        """The products of a stack: x (N, 1, in), each row by the matrix that ids (N,) names -> (N,
        1, out); `ordered`: whether the ids rise."""
        ...

    def rows(self, ids: mx.array) -> mx.array:
        """(T,) -> (T, in) in the model's dtype."""
        ...

    @property
    def arrays(self) -> tuple[mx.array, ...]: ...


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: mx.array  # (out, in)

    def multiply(self, x: mx.array) -> mx.array:
        return x.astype(self.weight.dtype) @ self.weight.T

    def multiply_each(self, x: mx.array, ids: mx.array, *, ordered: bool) -> mx.array:
        weight = self.weight.swapaxes(-1, -2)
        x = x.astype(weight.dtype)
        return mx.gather_mm(x, weight, rhs_indices=ids, sorted_indices=ordered)

    def rows(self, ids: mx.array) -> mx.array:
        return self.weight[ids]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Codes and scales as MLX's modes have them. Affine ones are multiplied in the dtype of their
    scales, the others in the model's."""

    codes: mx.array  # (out, in * bits / 32) uint32
    scales: mx.array  # (out, in / group_size)
    biases: mx.array | None  # (out, in / group_size)
    group_size: int
    bits: int
    mode: str
    dtype: mx.Dtype
    order: mx.array | None = None
    """(columns of the codes,) int32 the input feature of each, negative where it meets 0; None: as
    they are."""
    factor: mx.array | None = None
    """(out,) float32: multiplies the values of codes and scales."""

    def multiply(self, x: mx.array) -> mx.array:
        if self.order is not None:
            x = _ordered(x, self.order)
        product = mx.quantized_matmul(
            x.astype(self.dtype if self.biases is None else self.scales.dtype),
            self.codes,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return product if self.factor is None else product.astype(mx.float32) * self.factor

    def multiply_each(self, x: mx.array, ids: mx.array, *, ordered: bool) -> mx.array:
        assert self.order is None, "stacks are in order"
        product = mx.gather_qmm(
            x.astype(self.dtype if self.biases is None else self.scales.dtype),
            self.codes,
            self.scales,
            self.biases,
            rhs_indices=ids,
            sorted_indices=ordered,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        if self.factor is None:
            return product
        return product.astype(mx.float32) * self.factor[ids][:, None]

    def rows(self, ids: mx.array) -> mx.array:
        assert self.order is None, "a table of embeddings is in order"
        found = mx.dequantize(
            self.codes[ids],
            self.scales[ids],
            None if self.biases is None else self.biases[ids],
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=mx.float32,
        )
        return found if self.factor is None else found * self.factor[ids][:, None]

    def joins(self, other: Matrix) -> bool:
        """True if `joined` takes both."""
        return (
            isinstance(other, QuantisedMatrix)
            and self.order is None
            and other.order is None
            and self._kind == other._kind
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        scaled = self.factor is not None
        return self.group_size, self.bits, self.mode, self.scales.dtype, self.dtype, scaled

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        found = (self.codes, self.scales, self.biases, self.order, self.factor)
        return tuple(array for array in found if array is not None)


def _ordered(x: mx.array, order: mx.array) -> mx.array:
    """x (..., in) in the order of `QuantisedMatrix.order`."""
    found = x[..., order]
    return found if order.size == x.shape[-1] else mx.where(order < 0, 0, found)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a part of a checkpoint gets."""

    mode: str
    bits: int
    group_size: int
    order: bytes = b""
    """`QuantisedMatrix.order`; empty: in order."""

    def num_bytes(self, rows: int, cols: int) -> int:
        """The most that it takes of `cols` input features: with scales and biases, or a factor, of
        float32."""
        in_group, in_row = (8, 0) if self.mode == "affine" else (1, 4)
        cols = len(self.order) // 4 or cols
        in_row += cols * self.bits // 8 + cols // self.group_size * in_group
        return rows * in_row + len(self.order)

    def matrix(
        self, codes: mx.array, scales: mx.array, dtype: mx.Dtype, factor: mx.array | None = None
    ) -> QuantisedMatrix:
        """Makes the matrix of a mode without biases."""
        return QuantisedMatrix(
            codes, scales, None, self.group_size, self.bits, self.mode, dtype, factor=factor
        )


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices of different kinds, one below the other: a fused weight whose parts were quantised
    differently."""

    parts: tuple[Matrix, ...]

    def multiply(self, x: mx.array) -> mx.array:
        return mx.concatenate([part.multiply(x) for part in self.parts], axis=-1)

    def multiply_each(self, x: mx.array, ids: mx.array, *, ordered: bool) -> mx.array:
        products = [part.multiply_each(x, ids, ordered=ordered) for part in self.parts]
        return mx.concatenate(products, axis=-1)

    def rows(self, ids: mx.array) -> mx.array:
        raise AssertionError("a table of embeddings has one part")

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(array for part in self.parts for array in part.arrays)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix of `Ops.linear` or `Ops.logits` with its bias, or a stack of `Ops.experts`."""

    matrix: Matrix
    bias: mx.array | None  # (out,), of a stack (X, out)

    def multiply(self, x: mx.array) -> mx.array:
        """x (T, in) -> (T, out), as `Matrix.multiply`."""
        product = self.matrix.multiply(x)
        return product if self.bias is None else product + self.bias

    def multiply_each(self, x: mx.array, ids: mx.array, *, ordered: bool) -> mx.array:
        """Multiplies each row by its matrix, see `Matrix.multiply_each`."""
        product = self.matrix.multiply_each(x, ids, ordered=ordered)
        return product if self.bias is None else product + self.bias[ids][:, None]


def stacked(parts: list[Matrix]) -> Matrix:
    """One matrix of the parts, one below the other; neighbours of one kind become one array."""
    runs: list[list[Matrix]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = [_one(run) for run in runs]
    return joined[0] if len(joined) == 1 else StackedMatrix(tuple(joined))


def _alike(one: Matrix, other: Matrix) -> bool:
    if isinstance(one, QuantisedMatrix):
        return one.joins(other)
    return isinstance(one, DenseMatrix) and isinstance(other, DenseMatrix)


def _one(run: list[Matrix]) -> Matrix:
    return joined(run, axis=0) if len(run) > 1 else run[0]


def joined(matrices: Sequence[Matrix], axis: int) -> Matrix:
    """Matrices or stacks of one kind as one, along the rows or along the axis in front."""
    arrays = zip(*(matrix.arrays for matrix in matrices), strict=True)
    return with_arrays(matrices[0], [mx.concatenate(list(some), axis) for some in arrays])


def with_arrays(matrix: Matrix, arrays: Sequence[mx.array]) -> Matrix:
    """A matrix of the same kind with other `arrays`."""
    given = iter(arrays)
    if isinstance(matrix, QuantisedMatrix):
        codes, scales = next(given), next(given)
        biases = None if matrix.biases is None else next(given)
        factor = None if matrix.factor is None else next(given)
        return replace(matrix, codes=codes, scales=scales, biases=biases, factor=factor)
    return DenseMatrix(next(given))
