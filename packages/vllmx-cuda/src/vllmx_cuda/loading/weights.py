"""Brings a checkpoint's weights to the device: matrices in their forms, vectors and tables in
float32.

The mapped file is read by some rows at a time through a ring of pinned buffers. No second copy of
the model exists anywhere; what no form holds as it is stored is dequantised on the way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from vllmx_core.plan import F32, AnyArray
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.map import TieKey, bias_parts, has_bias, parts_of, tie_key
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.loading.streaming import stream
from vllmx_cuda.matrices import pieces as sizes
from vllmx_cuda.matrices.dense import dense_pieces
from vllmx_cuda.matrices.form import Segment
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.matrices.pieces import Piece
from vllmx_cuda.matrices.plan import MatrixPlan, WeightPlan

logger = logging.getLogger("vllmx.cuda")

Weight = Matrix | Memory
"""A matrix, or float32 values."""


def load_weights(
    specs: Sequence[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    plan: WeightPlan,
    device: Device,
    work: Memory,
    shared: Mapping[TieKey, tuple[Segment, ...]] | None = None,
    *,
    progress: bool = False,
) -> dict[str, Weight]:
    """Takes `plan.num_bytes` of device memory.

    Args:
        shared: matrices that another model has loaded.
        work: scratch of `plan.scratch.work` bytes, which no product uses yet: what the device puts
            into its order passes through it.
    """
    weights: dict[str, Weight] = {}
    tied = dict(shared or {})
    pieces: list[Piece] = []
    for spec in specs:
        if spec.kind == "vector":
            weights[spec.name] = vector = device.empty(4 * spec.rows)
            pieces += _vector_pieces(spec, source, vector)
            continue
        key = tie_key(spec)
        if key not in tied:
            tied[key] = _segments(plan.matrices[key], device, pieces)
        biases: list[Memory] = []
        rows = spec.count * spec.rows  # the matrices of a stack lie below each other
        for kind in ("f32", plan.dtype) if has_bias(spec) else ():
            biases.append(device.zeros(rows * ITEM_BYTES[kind]))
            pieces += _bias_pieces(spec, source, biases[-1], kind)
        weights[spec.name] = Matrix(tied[key], rows, spec.cols, *biases)
    for name, table in constants.items():
        weights[name] = memory = device.empty(4 * table.size)
        pieces += _table_pieces(memory, np.ascontiguousarray(table, np.float32))
    stream(pieces, device, work, progress=progress)
    _report(plan)
    return weights


def _report(plan: WeightPlan) -> None:
    dequantised: Counter[str] = Counter()
    for matrix in plan.matrices.values():
        dequantised.update(matrix.dequantised)
    for kind, values in dequantised.items():
        size = format_bytes(values * ITEM_BYTES[plan.dtype])
        logger.info("%s weights are dequantised at load and take %s as %s", kind, size, plan.dtype)


def _segments(plan: MatrixPlan, device: Device, pieces: list[Piece]) -> tuple[Segment, ...]:
    """The memory of a matrix; what fills it goes to `pieces`."""
    segments, begin = [], 0
    for run in plan.runs:
        data, first = device.empty(run.form.num_bytes(run.rows, plan.cols)), 0
        for part in run.parts:
            pieces += run.form.pieces(part, data, first, run.rows)
            first += part.shape[0]
        segments.append(Segment(run.form, data, begin, run.rows, plan.cols))
        begin += run.rows
    return tuple(segments)


def _vector_pieces(spec: WeightSpec, source: WeightSource, target: Memory) -> Iterator[Piece]:
    begin = 0
    for part in parts_of(spec, source):
        size = 4 * part.shape[0]
        yield from dense_pieces(part, target.at(begin, size), "f32", spec.offset)
        begin += size


def _bias_pieces(
    spec: WeightSpec, source: WeightSource, target: Memory, dtype: str
) -> Iterator[Piece]:
    begin = 0
    for part, bias in zip(spec.parts, bias_parts(spec, source), strict=True):
        size = part.rows * ITEM_BYTES[dtype]
        if bias is not None:
            yield from dense_pieces(bias, target.at(begin, size), dtype, 0.0)
        begin += size


def _table_pieces(target: Memory, table: F32) -> Iterator[Piece]:
    raw = table.reshape(-1).view(np.uint8)
    for begin in range(0, raw.nbytes, sizes.PIECE_BYTES):
        run = raw[begin : begin + sizes.PIECE_BYTES]
        yield Piece(target.at(begin, run.nbytes), partial(np.copyto, src=run))
