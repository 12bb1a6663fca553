"""From a checkpoint to weights on the device: matrices in the type that products are computed in,
fused parts below each other, vectors and tables in float32.

The mapped file is read by some rows at a time through a ring of pinned buffers: threads fill them,
and the device copies from one while the next are filled. No second copy of the model exists
anywhere; a layout that the kernels do not multiply is dequantised on the way.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
from vllmx_core.cores import available_cores
from vllmx_core.memory import format_bytes
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weight_map import checked
from vllmx_core.weights import DENSE, PartSpec, WeightPart, WeightSource, WeightSpec, f32_to_bf16

from vllmx_cuda.device import Bytes, Device, Event, Memory
from vllmx_cuda.dtypes import ITEM_BYTES

logger = logging.getLogger("vllmx.cuda")

PIECE_BYTES = 32 << 20
PIECES_IN_FLIGHT = 4

_TieKey = tuple[tuple[PartSpec, ...], float]


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a linear and the head multiply by, and the embedding gathers from."""

    data: Memory  # (rows, cols)
    rows: int
    cols: int
    bias: Memory | None = None  # (rows,) float32
    rounded_bias: Memory | None = None  # (rows,) in the model's dtype, as cuBLASLt wants it


Weight = Matrix | Memory
"""A matrix, or float32 values."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of rows: what fills a pinned buffer, and where the buffer goes."""

    target: Memory
    fill: Callable[[Bytes], object]


def weight_bytes(specs: Sequence[WeightSpec], constants: Mapping[str, AnyArray], dtype: str) -> int:
    """Device memory that `load_weights` takes for a map."""
    item = ITEM_BYTES[dtype]
    matrices: dict[_TieKey, int] = {}
    rest = sum(table.size * 4 for table in constants.values())
    for spec in specs:
        if spec.kind == "vector":
            rest += spec.rows * 4
            continue
        rest += spec.rows * (4 + item) * _has_bias(spec)
        matrices[_tie_key(spec)] = spec.rows * spec.cols * item
    return sum(matrices.values()) + rest


def load_weights(
    specs: Sequence[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    dtype: str,
    device: Device,
    *,
    progress: bool = False,
) -> dict[str, Weight]:
    """Raises WeightFormatError that names the tensor when one is missing or has another shape than
    the map says, before anything is read."""
    weights: dict[str, Weight] = {}
    tied: dict[_TieKey, Memory] = {}
    pieces: list[_Piece] = []
    dequantised: Counter[str] = Counter()
    for spec in specs:
        if spec.kind == "vector":
            weights[spec.name] = vector = device.empty(4 * spec.rows)
            pieces += _parts(spec, source, vector, "f32", (), dequantised)
            continue
        key = _tie_key(spec)
        if key not in tied:
            tied[key] = device.empty(spec.rows * spec.cols * ITEM_BYTES[dtype])
            pieces += _parts(spec, source, tied[key], dtype, (spec.cols,), dequantised)
        biases: list[Memory] = []
        for kind in ("f32", dtype) if _has_bias(spec) else ():
            biases.append(device.zeros(spec.rows * ITEM_BYTES[kind]))
            pieces += _bias_parts(spec, source, biases[-1], kind)
        weights[spec.name] = Matrix(tied[key], spec.rows, spec.cols, *biases)
    for name, table in constants.items():
        weights[name] = memory = device.empty(4 * table.size)
        pieces += _table_pieces(memory, np.ascontiguousarray(table, np.float32))
    _stream(pieces, device, progress)
    for kind, values in dequantised.items():
        size = format_bytes(values * ITEM_BYTES[dtype])
        logger.info("%s weights are dequantised at load and take %s as %s", kind, size, dtype)
    return weights


def _tie_key(spec: WeightSpec) -> _TieKey:
    """Equal for specs that one matrix serves."""
    return spec.parts, spec.offset


def _has_bias(spec: WeightSpec) -> bool:
    return spec.kind == "linear" and any(part.bias is not None for part in spec.parts)


def _parts(
    spec: WeightSpec,
    source: WeightSource,
    target: Memory,
    dtype: str,
    cols: tuple[int, ...],
    dequantised: Counter[str],
) -> Iterator[_Piece]:
    """Pieces of a logical weight, its parts below each other."""
    begin = 0
    row_bytes = (cols[0] if cols else 1) * ITEM_BYTES[dtype]
    for part_spec in spec.parts:
        part = checked(source.part(part_spec.name), (part_spec.rows, *cols))
        size = part_spec.rows * row_bytes
        yield from _part_pieces(part, target.at(begin, size), dtype, spec.offset)
        if part.layout != DENSE:
            dequantised[part.layout.kind] += size // ITEM_BYTES[dtype]
        begin += size


def _bias_parts(
    spec: WeightSpec, source: WeightSource, target: Memory, dtype: str
) -> Iterator[_Piece]:
    begin = 0
    for part_spec in spec.parts:
        size = part_spec.rows * ITEM_BYTES[dtype]
        if part_spec.bias is not None:
            part = checked(source.part(part_spec.bias), (part_spec.rows,))
            yield from _part_pieces(part, target.at(begin, size), dtype, 0.0)
        begin += size


def _part_pieces(part: WeightPart, target: Memory, dtype: str, offset: float) -> Iterator[_Piece]:
    """Bytes as they are where the file holds `dtype`; else rounded to it, from float32. A piece is
    some rows, which are decoded for it alone."""
    plain = part.layout == DENSE and part.decode is None and part.cut is None and not offset
    as_it_is = plain and part.buffers["weight"].dtype == dtype

    def fill(buffer: Bytes, begin: int, end: int) -> None:
        if as_it_is:
            np.copyto(buffer, part.buffers["weight"].rows(begin, end).data)
        else:
            values = part.dequantize(begin, end).reshape(-1)
            buffer[...] = _rounded(values + np.float32(offset) if offset else values, dtype)

    count = part.shape[0]
    row_bytes = target.num_bytes // count
    most = max(1, PIECE_BYTES // row_bytes)
    for begin in range(0, count, most):
        end = min(count, begin + most)
        yield _Piece(
            target.at(begin * row_bytes, (end - begin) * row_bytes),
            partial(fill, begin=begin, end=end),
        )


def _table_pieces(target: Memory, table: F32) -> Iterator[_Piece]:
    raw = table.reshape(-1).view(np.uint8)
    for begin in range(0, raw.nbytes, PIECE_BYTES):
        run = raw[begin : begin + PIECE_BYTES]
        yield _Piece(target.at(begin, run.nbytes), partial(np.copyto, src=run))


def _rounded(values: F32, dtype: str) -> Bytes:
    if dtype == "bf16":
        return f32_to_bf16(values).view(np.uint8)
    with np.errstate(over="ignore"):  # beyond float16: infinity, as the checkpoint's maker chose
        kind = np.float16 if dtype == "f16" else np.float32
        return np.ascontiguousarray(values, kind).view(np.uint8)


def _stream(pieces: Sequence[_Piece], device: Device, progress: bool) -> None:
    """Fills buffers ahead of the copies, which run in the order of the pieces."""
    if not pieces:
        return
    size = max(piece.target.num_bytes for piece in pieces)
    buffers = [device.pinned(size) for _ in range(min(PIECES_IN_FLIGHT, len(pieces)))]
    copied: list[Event | None] = [None] * len(buffers)
    filling: deque[tuple[_Piece, int, Future[object]]] = deque()
    done, total = 0, sum(piece.target.num_bytes for piece in pieces)
    with ThreadPoolExecutor(min(len(buffers), available_cores())) as pool:
        for piece, slot in zip(pieces, cycle(range(len(buffers))), strict=False):
            if len(filling) == len(buffers):
                done += _send(*filling.popleft(), buffers, copied, device)
                _show(progress, done, total)
            event = copied[slot]
            if event is not None:
                event.wait()
            buffer = buffers[slot][: piece.target.num_bytes]
            filling.append((piece, slot, pool.submit(piece.fill, buffer)))
        while filling:
            done += _send(*filling.popleft(), buffers, copied, device)
            _show(progress, done, total)
    device.synchronize()


def _send(
    piece: _Piece,
    slot: int,
    filled: Future[object],
    buffers: Sequence[Bytes],
    copied: list[Event | None],
    device: Device,
) -> int:
    filled.result()
    device.upload(piece.target, buffers[slot][: piece.target.num_bytes])
    copied[slot] = device.event()
    return piece.target.num_bytes


def _show(progress: bool, done: int, total: int) -> None:
    if progress:
        share = done / total
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rloading weights [{'#' * int(share * 30):<30}] {share:4.0%}{end}")
