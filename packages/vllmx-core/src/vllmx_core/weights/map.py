"""Turns a model's weight map and a checkpoint into parts, and into plain float32 arrays.

Every backend reads a spec's parts through `parts_of` and its bias through `bias_of`, so that what a
map can pick is picked the same way everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights.part import (
    DENSE,
    PartSpec,
    RawTensor,
    RowRuns,
    WeightPart,
    WeightSource,
    WeightSpec,
    made_part,
)
from vllmx_core.weights.picks import any_cols_of, entry_of, rows_of, share_of, transposed, turned

_CODES = frozenset(("i64", "i32", "i16", "i8", "u32", "u8", "bool", "f8e8m0"))
"""Dtypes of what only a format makes numbers of."""
TieKey = tuple[tuple[PartSpec, ...], float]


def tie_key(spec: WeightSpec) -> TieKey:
    """Equal for specs that one matrix serves, such as an embedding and the head that is tied to
    it."""
    return spec.parts, spec.offset


def parts_of(spec: WeightSpec, source: WeightSource) -> tuple[WeightPart, ...]:
    """The parts of a weight in the order of its rows, each (rows, cols) or a vector's (rows,), with
    everything picked that the map picks. Nothing is read but what tells shapes. Raises
    WeightFormatError for a tensor that is missing or has another shape than the map says."""
    return tuple(_part(spec, part, source) for part in spec.parts)


def bias_parts(spec: WeightSpec, source: WeightSource) -> tuple[WeightPart | None, ...]:
    """The (rows,) bias of each part, None where it has none. Raises as `parts_of`."""
    return tuple(None if part.bias is None else _bias(part, source) for part in spec.parts)


def bias_of(spec: WeightSpec, source: WeightSource) -> F32 | None:
    """(rows,) bias of a weight, with zeros for parts that have none; None where no part has one.
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
    """Whether a matrix has a bias that is added; a table that is tied to it gathers without."""
    return spec.kind != "embedding" and any(part.bias is not None for part in spec.parts)


def assemble(spec: WeightSpec, source: WeightSource) -> tuple[F32, F32 | None]:
    """The logical weight, (rows, cols), a vector's (rows,) or a stack's (count, rows, cols), and
    its bias as `bias_of` gives it, a stack's (count, rows). Raises as `parts_of`."""
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
    """The part itself. Raises WeightFormatError when its shape is not `shape`."""
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
    part = _numbers(source, wanted.name)
    if spec.shape is not None:
        if spec.kind in ("linear", "embedding"):
            return _flattened(part, spec.shape, (wanted.rows, spec.cols))
        return _shaped(part, spec.shape, wanted)
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
    """A tensor of the source. Raises WeightFormatError for integers without a format."""
    part = source.part(name)
    is_stored = part.layout == DENSE and part.cut is None  # others would be made at this look
    stored = part.buffers.get("weight") if is_stored else None
    if stored is not None and stored.dtype in _CODES:
        raise WeightFormatError(
            f"tensor {name!r} holds {stored.dtype} codes of a quantised checkpoint, whose format"
            " config.json does not name: take the original, or add its quantization_config"
        )
    return part


def _of_stack(part: WeightPart, entry: int, *, axes: int) -> WeightPart:
    """One entry of a stack that has so many axes. Raises WeightFormatError for another number."""
    if len(part.shape) != axes:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, a stack of {axes} axes is"
            " wanted: config.json and weights do not belong together"
        )
    return entry_of(part, entry)


def resolved(source: WeightSource, wanted: PartSpec) -> PartSpec:
    """The part, or the first of its alternatives that is there in its place."""
    if not wanted.alternatives:
        return wanted
    names = source.names()
    return next((one for one in choices(wanted) if one.name in names), wanted)


def name_in(source: WeightSource, wanted: PartSpec) -> str:
    """What the tensor is called there."""
    return resolved(source, wanted).name


def choices(wanted: PartSpec) -> Iterator[PartSpec]:
    """The part and its alternatives, each with a name of its own."""
    yield wanted
    for other in wanted.alternatives:
        if isinstance(other, str):
            yield replace(wanted, name=other, bias=_beside(wanted, other))
        else:
            yield from choices(other)


def unread_names(specs: Iterable[WeightSpec], source: WeightSource) -> set[str]:
    """Tensors of the source that no weight reads under any name."""
    parts = [one for spec in specs for part in spec.parts for one in choices(part)]
    return set(source.names()) - {part.name for part in parts} - {part.bias for part in parts}


def _beside(wanted: PartSpec, name: str) -> str | None:
    """The bias of a matrix that has another name: beside it, where it is beside this one."""
    end = ".weight"
    beside = wanted.bias == wanted.name.removesuffix(end) + ".bias"
    return name.removesuffix(end) + ".bias" if beside and name.endswith(end) else wanted.bias


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
    """The values of a tensor of this shape as one row, axes of length 1 left out; of one that is
    picked from, those of the rows of the first axis."""
    if [n for n in part.shape if n > 1] != [n for n in shape if n > 1]:
        checked(part, shape)
    each = math.prod(shape[1:])
    index = None if wanted.runs is None else wanted.runs.index(wanted.rows // each)
    if index is not None and len(index) and index[-1] >= shape[0]:
        raise _beyond(part, wanted.runs, index)
    if index is None and part.decode is None and part.cut is None:
        raw, flat = part.buffers["weight"], (math.prod(shape),)
        return replace(part, shape=flat, buffers={"weight": replace(raw, shape=flat)})

    def values() -> F32:
        rows = part.dequantize().reshape(shape[0], each)
        return (rows if index is None else rows[index]).reshape(-1)

    return _made(part.name, (wanted.rows,), values)


def _flattened(part: WeightPart, shape: tuple[int, ...], matrix: tuple[int, int]) -> WeightPart:
    """A tensor of this shape as a matrix, axes of length 1 left out."""
    if [n for n in part.shape if n > 1] != [n for n in shape if n > 1]:
        checked(part, shape)
    if part.decode is None and part.cut is None:
        raw = part.buffers["weight"]
        return replace(part, shape=matrix, buffers={"weight": replace(raw, shape=matrix)})

    return _made(part.name, matrix, lambda: part.dequantize().reshape(matrix))


def _made(name: str, shape: tuple[int, ...], values: Callable[[], F32]) -> WeightPart:
    """A part whose values are computed; rows of it can be picked like those of any other."""

    def make(begin: int, end: int) -> WeightPart:
        rows = np.ascontiguousarray(values()[begin:end])
        raw = RawTensor(name, "f32", rows.shape, rows.reshape(-1).view(np.uint8))
        return WeightPart(name, rows.shape, DENSE, {"weight": raw})

    return made_part(name, shape, DENSE, make)


def _unshared(wanted: PartSpec) -> PartSpec:
    """What all ranks have of the part."""
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
