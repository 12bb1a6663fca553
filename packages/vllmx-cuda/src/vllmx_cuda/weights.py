"""From a checkpoint to weights on the device: matrices in their forms, vectors and tables in
float32.

The mapped file is read by some rows at a time through a ring of pinned buffers: threads fill them,
and the device copies from one while the next are filled. No second copy of the model exists
anywhere; what no form holds as it is stored is dequantised on the way.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle

import numpy as np
from vllmx_core.cores import available_cores
from vllmx_core.memory import format_bytes
from vllmx_core.plan import F32, AnyArray
from vllmx_core.progress import show_progress
from vllmx_core.weight_map import TieKey, tie_key
from vllmx_core.weights import WeightSource, WeightSpec

from vllmx_cuda.device import Bytes, Device, Event, Memory
from vllmx_cuda.dtypes import ITEM_BYTES
from vllmx_cuda.matrices import pieces as sizes
from vllmx_cuda.matrices.dense import dense_pieces
from vllmx_cuda.matrices.form import Segment
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.matrices.pieces import Piece
from vllmx_cuda.matrices.plan import MatrixPlan, WeightPlan, has_bias

logger = logging.getLogger("vllmx.cuda")

PIECES_IN_FLIGHT = 4
"""At least; as many as there are cores to fill them, up to the next."""
MOST_IN_FLIGHT = 12
"""Blocks of GGUF are put into another order at about 200 MB/s a core, a GPU takes 25 GB/s."""

Weight = Matrix | Memory
"""A matrix, or float32 values."""


def load_weights(
    specs: Sequence[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    plan: WeightPlan,
    device: Device,
    *,
    progress: bool = False,
) -> dict[str, Weight]:
    """Takes `plan.num_bytes` of device memory."""
    weights: dict[str, Weight] = {}
    tied: dict[TieKey, tuple[Segment, ...]] = {}
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
        for kind in ("f32", plan.dtype) if has_bias(spec) else ():
            biases.append(device.zeros(spec.rows * ITEM_BYTES[kind]))
            pieces += _bias_pieces(spec, source, biases[-1], kind)
        weights[spec.name] = Matrix(tied[key], spec.rows, spec.cols, *biases)
    for name, table in constants.items():
        weights[name] = memory = device.empty(4 * table.size)
        pieces += _table_pieces(memory, np.ascontiguousarray(table, np.float32))
    _stream(pieces, device, progress)
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
    for part in spec.parts:
        span = target.at(4 * begin, 4 * part.rows)
        yield from dense_pieces(source.part(part.name), span, "f32", spec.offset)
        begin += part.rows


def _bias_pieces(
    spec: WeightSpec, source: WeightSource, target: Memory, dtype: str
) -> Iterator[Piece]:
    begin = 0
    for part in spec.parts:
        size = part.rows * ITEM_BYTES[dtype]
        if part.bias is not None:
            yield from dense_pieces(source.part(part.bias), target.at(begin, size), dtype, 0.0)
        begin += size


def _table_pieces(target: Memory, table: F32) -> Iterator[Piece]:
    raw = table.reshape(-1).view(np.uint8)
    for begin in range(0, raw.nbytes, sizes.PIECE_BYTES):
        run = raw[begin : begin + sizes.PIECE_BYTES]
        yield Piece(target.at(begin, run.nbytes), partial(np.copyto, src=run))


def _stream(pieces: Sequence[Piece], device: Device, progress: bool) -> None:
    """Fills buffers ahead of the copies, which run in the order of the pieces."""
    if not pieces:
        return
    size = max(piece.num_bytes for piece in pieces)
    most = min(max(PIECES_IN_FLIGHT, available_cores()), MOST_IN_FLIGHT, len(pieces))
    buffers = [device.pinned(size) for _ in range(most)]
    copied: list[Event | None] = [None] * len(buffers)
    filling: deque[tuple[Piece, int, Future[object]]] = deque()
    done, total = 0, sum(piece.num_bytes for piece in pieces)
    with ThreadPoolExecutor(min(len(buffers), available_cores())) as pool:
        for piece, slot in zip(pieces, cycle(range(len(buffers))), strict=False):
            if len(filling) == len(buffers):
                done += _send(*filling.popleft(), buffers, copied, device)
                if progress:
                    show_progress("loading weights", done, total)
            event = copied[slot]
            if event is not None:
                event.wait()
            buffer = buffers[slot][: piece.num_bytes]
            filling.append((piece, slot, pool.submit(piece.fill, buffer)))
        while filling:
            done += _send(*filling.popleft(), buffers, copied, device)
            if progress:
                show_progress("loading weights", done, total)
    device.synchronize()


def _send(
    piece: Piece,
    slot: int,
    filled: Future[object],
    buffers: Sequence[Bytes],
    copied: list[Event | None],
    device: Device,
) -> int:
    filled.result()
    begin = 0
    for target in piece.targets:
        device.upload(target, buffers[slot][begin : begin + target.num_bytes])
        begin += target.num_bytes
    copied[slot] = device.event()
    return piece.num_bytes
