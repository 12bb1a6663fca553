"""Resolves a model's weight map against a checkpoint.

Every backend reads a weight's parts with `parts_of` and its bias with `bias_of`, so that picks mean
the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart, WeightSource, is_plain
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec
from vllmx_core.weights.views import (
    Permuted,
    Reshaped,
    any_cols_of,
    entry_of,
    rows_of,
    share_of,
    transposed,
    turned,
)

_CODES = frozenset(("i64", "i32", "i16", "i8", "u32", "u8", "bool", "f8e8m0"))
"""Dtypes whose values mean nothing without a quantisation."""
TieKey = tuple[tuple[PartSpec, ...], float]


def tie_key(spec: WeightSpec) -> TieKey:
    """Returns a key that tied weights share, such as an embedding and its head."""
    return spec.parts, spec.offset


def parts_of(spec: WeightSpec, source: WeightSource) -> tuple[WeightPart, ...]:
    """Returns the parts of a weight in the order of its rows, each (rows, cols) or for vectors
    (rows,), with the map's picks applied. Reads only what tells shapes. Raises WeightFormatError
    for a tensor that is missing or has another shape than the map says."""
    return tuple(_part(spec, part, source) for part in spec.parts)


def bias_parts(spec: WeightSpec, source: WeightSource) -> tuple[WeightPart | None, ...]:
    """Returns the (rows,) bias of each part, None for parts without. Raises as `parts_of`."""
    return tuple(None if part.bias is None else _bias(part, source) for part in spec.parts)


def bias_of(spec: WeightSpec, source: WeightSource) -> F32 | None:
    """Returns the (rows,) bias of a weight, zeros for parts without; None if no part has one.
    Raises WeightFormatError as `parts_of`."""
    biases = bias_parts(spec, source)
    if not any(biases):
        return None
    found = zip(spec.parts, biases, strict=True)
    return np.concatenate(
        [
            np.zeros(part.rows, np.float32) if bias is None else bias.dequantize()
            for part, bias in found
        ]
    )


def has_bias(spec: WeightSpec) -> bool:
    """True if a matrix has a bias to add; embeddings have none, even if tied to one."""
    return spec.kind != "embedding" and any(part.bias is not None for part in spec.parts)


def assemble(spec: WeightSpec, source: WeightSource) -> tuple[F32, F32 | None]:
    """Returns the weight as (rows, cols), (rows,) for vectors or (count, rows, cols) for stacks,
    and its bias as `bias_of`, (count, rows) for stacks. Raises as `parts_of`."""
    if spec.kind == "stack":
        found = [assemble(matrix, source) for matrix in spec.matrices]
        biases = [bias for _, bias in found if bias is not None]
        return np.stack([weight for weight, _ in found]), np.stack(biases) if biases else None
    tensors = [part.dequantize() for part in parts_of(spec, source)]
    weight = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    if spec.offset:
        weight = weight + np.float32(spec.offset)
    return weight, bias_of(spec, source)


def checked(part: WeightPart, shape: tuple[int, ...]) -> WeightPart:
    """Returns the part. Raises WeightFormatError when its shape is not `shape`."""
    if part.shape != shape:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, the model's config asks for"
            f" {list(shape)}: config.json and weights do not belong together"
        )
    return part


def _part(spec: WeightSpec, wanted: PartSpec, source: WeightSource) -> WeightPart:
    if wanted.share is not None:
        whole = replace(spec, cols=wanted.share.whole_cols)
        return share_of(_part(whole, _unshared(wanted), source), wanted.share)
    wanted = resolved(source, wanted)
    part = source.part(wanted.name) if spec.role == "ids" else _numbers(source, wanted.name)
    if (shape := spec.shape_of(wanted)) is not None:
        if spec.kind in ("linear", "embedding"):
            matrix = (wanted.rows, spec.cols)
            found = _flattened(part, shape, matrix)
            if spec.axes is None:
                return found
            return Permuted(part.name, matrix, DENSE, (found,), whole=shape, axes=spec.axes)
        return _shaped(part, shape, wanted)
    if wanted.entry is not None:
        part = _of_stack(part, wanted.entry, axes=2 if spec.kind == "vector" else 3)
    fits = len(part.shape) == 2 and part.shape[1] == spec.cols
    if wanted.transposed or (wanted.transposed is None and not fits):
        part = transposed(part)
    if wanted.runs is not None:
        part = _picked(part, wanted.runs, spec.cols if wanted.turned else wanted.rows)
    if wanted.first_col is not None:
        begin, end = wanted.first_col, wanted.first_col + spec.cols
        if len(part.shape) != 2 or end > part.shape[1]:
            raise WeightFormatError(
                f"tensor {part.name!r} has shape {list(part.shape)}, of which the columns {begin}"
                f" to {end - 1} are wanted: config.json and weights do not belong together"
            )
        part = any_cols_of(part, begin, end)
    if wanted.turned:
        part = turned(part)
    return checked(part, (wanted.rows,) if spec.kind == "vector" else (wanted.rows, spec.cols))


def _numbers(source: WeightSource, name: str) -> WeightPart:
    """Returns a tensor of the source. Raises WeightFormatError for integers without a format."""
    part = source.part(name)
    stored = part.buffers.get("weight") if isinstance(part, StoredPart) else None
    if stored is not None and part.layout == DENSE and stored.dtype in _CODES:
        raise WeightFormatError(
            f"tensor {name!r} holds {stored.dtype} codes of a quantised checkpoint, whose format"
            " config.json does not name: take the original, or add its quantization_config"
        )
    return part


def _of_stack(part: WeightPart, entry: int, *, axes: int) -> WeightPart:
    """Returns an entry of a stack. Raises WeightFormatError if it has another number of axes."""
    if len(part.shape) != axes:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, a stack of {axes} axes is"
            " wanted: config.json and weights do not belong together"
        )
    return entry_of(part, entry)


def resolved(source: WeightSource, wanted: PartSpec) -> PartSpec:
    """Returns the part, or the first of its alternatives that the source has."""
    if not wanted.alternatives:
        return wanted
    names = source.names()
    return next((one for one in choices(wanted) if one.name in names), wanted)


def name_in(source: WeightSource, wanted: PartSpec) -> str:
    """Returns the tensor's name in the source."""
    return resolved(source, wanted).name


def choices(wanted: PartSpec) -> Iterator[PartSpec]:
    """Yields the part and its alternatives under their own names."""
    yield wanted
    for other in wanted.alternatives:
        if isinstance(other, str):
            yield replace(wanted, name=other, bias=_bias_of_alternative(wanted, other))
        else:
            yield from choices(other)


def unread_names(specs: Iterable[WeightSpec], source: WeightSource) -> set[str]:
    """Returns the source's tensors that no weight reads under any name."""
    parts = [one for spec in specs for part in spec.parts for one in choices(part)]
    return set(source.names()) - {part.name for part in parts} - {part.bias for part in parts}


def _bias_of_alternative(wanted: PartSpec, name: str) -> str | None:
    """Returns the bias of an alternative: renamed with the matrix if both are named alike."""
    end = ".weight"
    alike = wanted.bias == wanted.name.removesuffix(end) + ".bias"
    return name.removesuffix(end) + ".bias" if alike and name.endswith(end) else wanted.bias


def _picked(part: WeightPart, runs: RowRuns, rows: int) -> WeightPart:
    index = runs.index(rows)
    if not part.shape or len(index) != rows or (len(index) and index[-1] >= part.shape[0]):
        raise _beyond(part, runs, index)
    return rows_of(part, index)


def _beyond(
    part: WeightPart, runs: RowRuns | None, index: npt.NDArray[np.int64]
) -> WeightFormatError:
    begin = 0 if runs is None else runs.begin
    return WeightFormatError(
        f"tensor {part.name!r} has shape {list(part.shape)}, of which the rows {begin} to"
        f" {int(index.max(initial=begin))} are wanted: config.json and weights do not belong"
        " together"
    )


def _shaped(part: WeightPart, shape: tuple[int, ...], wanted: PartSpec) -> WeightPart:
    """Returns the values of a tensor of this shape as one row, ignoring axes of length 1; with
    `runs` those of the picked rows of its first axis."""
    _check_axes(part, shape)
    if wanted.runs is None:
        return _reshaped(part, (math.prod(shape),))
    index = wanted.runs.index(wanted.rows // math.prod(shape[1:]))
    if len(index) and index[-1] >= shape[0]:
        raise _beyond(part, wanted.runs, index)
    picked = rows_of(_reshaped(part, (shape[0], math.prod(shape[1:]))), index)
    return _reshaped(picked, (wanted.rows,))


def _flattened(part: WeightPart, shape: tuple[int, ...], matrix: tuple[int, int]) -> WeightPart:
    """Returns a tensor of this shape, or of the matrix's, as a matrix. Axes of length 1 are
    ignored."""
    if _axes(part.shape) != _axes(matrix):
        _check_axes(part, shape)
    return _reshaped(part, matrix)


def _axes(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n > 1]


def _check_axes(part: WeightPart, shape: tuple[int, ...]) -> None:
    if _axes(part.shape) != _axes(shape):
        checked(part, shape)


def _reshaped(part: WeightPart, shape: tuple[int, ...]) -> WeightPart:
    if not is_plain(part):
        return Reshaped(part.name, shape, DENSE, (part,))
    raw = part.stored().buffers["weight"]
    return StoredPart(part.name, shape, DENSE, {"weight": replace(raw, shape=shape)})


def _unshared(wanted: PartSpec) -> PartSpec:
    """Returns the part of all ranks together."""
    assert wanted.share is not None
    return replace(wanted, rows=wanted.share.whole_rows, share=None)


def _bias(wanted: PartSpec, source: WeightSource) -> WeightPart:
    assert wanted.bias is not None
    if wanted.share is not None:
        return share_of(_bias(_unshared(wanted), source), replace(wanted.share, cols=None))
    wanted = resolved(source, wanted)
    assert wanted.bias is not None
    part = _numbers(source, wanted.bias)
    if wanted.entry is not None:
        part = _of_stack(part, wanted.entry, axes=2)
    if wanted.runs is not None:
        part = _picked(part, wanted.runs, wanted.rows)
    return checked(part, (wanted.rows,))
