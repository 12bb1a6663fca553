"""Packs a checkpoint's weights into the layout of the kernels: parallel, and without any other copy
of the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.records import Record
from vllmx_core.system.progress import show_progress
from vllmx_core.weights.files import ReadingRoom
from vllmx_core.weights.map import bias_of, parts_of
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.spec import WeightSpec
from vllmx_core.weights.tensor import ITEM_BYTES, float8_to_f32

from vllmx_cpu.kinds import column_order, native_kind, packed_cols, packed_columns
from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.native import library
from vllmx_cpu.structs import (
    AFFINE_KINDS,
    BLOCK_KINDS,
    CODED_KINDS,
    FLOAT8_COLS,
    FLOAT8_KIND,
    VX_DTYPES,
    WEIGHT_KINDS,
    VxWeight,
)

COLS_OF = {kind: cols for (_, cols), kind in AFFINE_KINDS.items()}

logger = logging.getLogger("vllmx.cpu")

TILE_ROWS = 32
BLOCK_ROWS = 16
ROWS_AT_ONCE = 512
"""Rows that one thread packs before it takes the next piece; a multiple of BLOCK_ROWS."""
ALIGNMENT = 4096


class MatrixShape(Record):
    """Size and layout of a packed matrix, or of each of a stack."""

    rows: int
    cols: int
    kind: str
    gated: bool
    count: int = 1
    """Matrices that lie one behind the other."""
    filled: int = 0
    """Columns among `cols` that no input feature has."""

    @property
    def tiles(self) -> int:
        if self.gated:
            return -(-self.rows // 2 // BLOCK_ROWS)
        return -(-self.rows // TILE_ROWS)

    @property
    def matrix_bytes(self) -> int:
        return int(library().vx_packed_bytes(self.tiles, self.cols, WEIGHT_KINDS[self.kind]))

    @property
    def num_bytes(self) -> int:
        return self.count * self.matrix_bytes

    def packed_rows(self) -> AnyArray:
        """The row among its tiles' rows (rows,) of each row of a logical matrix."""
        rows = np.arange(self.rows)
        if not self.gated:
            return rows
        half, local = rows // (self.rows // 2), rows % (self.rows // 2)
        return local // BLOCK_ROWS * TILE_ROWS + half * BLOCK_ROWS + local % BLOCK_ROWS


class PackedMatrix(Record):
    """A matrix ready for `linear` and `embedding`, or a stack for `experts`."""

    shape: MatrixShape
    data: Bytes
    bias: F32 | None  # (count * tiles * 32,) in packed order
    columns: I32 | None = (
        None  # (count * cols,) input feature of each packed column, -1: none; None: in order
    )

    def struct(self) -> VxWeight:
        """The matrix, or the first of the stack."""
        bias = None if self.bias is None else self.bias.ctypes.data
        columns = None if self.columns is None else self.columns.ctypes.data
        shape = self.shape
        return VxWeight(
            self.data.ctypes.data,
            bias,
            WEIGHT_KINDS[shape.kind],
            shape.rows,
            shape.cols,
            shape.tiles,
            int(shape.gated),
            shape.cols - shape.filled,
            columns,
        )


class LoadedWeights(Record):
    """Everything that ops point to; the arrays must live as long as the tape."""

    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, F32]
    tied: Mapping[tuple[object, ...], PackedMatrix]
    """The matrices by `tie_key`."""

    @property
    def num_bytes(self) -> int:
        packed = {id(m.data): m.data.nbytes for m in self.matrices.values()}
        return sum(packed.values()) + sum(vector.nbytes for vector in self.vectors.values())


def matrix_shapes(
    specs: Sequence[WeightSpec],
    kind: str,
    gated: Collection[str],
    source: WeightSource | None = None,
) -> dict[str, MatrixShape]:
    """Layout of every matrix of a weight map; a table that is tied to the head appears twice. With
    `source`, matrices that it holds in a quantised type of the kernels stay as they are."""
    return {
        spec.name: _matrix_shape(spec, kind, source, gated=spec.name in gated)
        for spec in specs
        if spec.kind != "vector"
    }


def _matrix_shape(
    spec: WeightSpec, kind: str, source: WeightSource | None, *, gated: bool
) -> MatrixShape:
    kind = (None if source is None else native_kind(spec, source)) or kind
    filled = 0
    if source is not None and kind in CODED_KINDS:
        parts = (parts_of(matrix, source)[0] for matrix in spec.matrices)
        filled = max(packed_cols(part) for part in parts) - spec.cols
    return MatrixShape(spec.rows, spec.cols + filled, kind, gated, spec.count, filled)


def tie_key(spec: WeightSpec, shape: MatrixShape) -> tuple[object, ...]:
    """Equal for specs that one packed matrix serves."""
    return (spec.parts, spec.offset, shape)


def packed_bytes(
    specs: Sequence[WeightSpec],
    shapes: Mapping[str, MatrixShape],
    shared: Collection[tuple[object, ...]] = (),
) -> int:
    """Memory that the weights of a map will take, but for matrices that are shared."""
    tied = {tie_key(s, shapes[s.name]): shapes[s.name] for s in specs if s.name in shapes}
    tied = {key: shape for key, shape in tied.items() if key not in shared}
    vectors = sum(spec.rows * 4 for spec in specs if spec.kind == "vector")
    return sum(shape.num_bytes for shape in tied.values()) + vectors


def load_weights(
    specs: Sequence[WeightSpec],
    constants: Mapping[str, AnyArray],
    source: WeightSource,
    shapes: Mapping[str, MatrixShape],
    *,
    shared: Mapping[tuple[object, ...], PackedMatrix] | None = None,
    num_threads: int,
    progress: bool,
) -> LoadedWeights:
    """Packs the whole map, but for matrices of another model that are `shared`. Raises
    WeightFormatError that names the tensor when one is missing or has another shape than the map
    says."""
    matrices: dict[str, PackedMatrix] = {}
    vectors = {name: np.ascontiguousarray(table, np.float32) for name, table in constants.items()}
    jobs: list[Callable[[], None]] = []
    decoded: list[tuple[WeightPart, str]] = []
    room = ReadingRoom()
    tied = dict(shared or {})
    for spec in specs:
        if spec.kind == "vector":
            vectors[spec.name] = _vector(spec, source)
            continue
        shape = shapes[spec.name]
        key = tie_key(spec, shape)
        if key not in tied:
            tied[key] = PackedMatrix(
                shape,
                allocate(shape.num_bytes),
                _bias(spec, source, shape),
                _columns(spec, source, shape) if shape.kind in CODED_KINDS else None,
            )
            jobs += _matrix_jobs(spec, source, tied[key], decoded, room)
        matrices[spec.name] = tied[key]
    _log_decoded(decoded)
    _run(jobs, num_threads, progress)
    return LoadedWeights(matrices, vectors, tied)


def _vector(spec: WeightSpec, source: WeightSource) -> F32:
    parts = [part.dequantize() for part in parts_of(spec, source)]
    vector = np.concatenate(parts) + np.float32(spec.offset)
    return np.ascontiguousarray(vector, np.float32)


def _bias(spec: WeightSpec, source: WeightSource, shape: MatrixShape) -> F32 | None:
    biases = [bias_of(matrix, source) for matrix in spec.matrices]
    if all(bias is None for bias in biases):
        return None
    packed = np.zeros((shape.count, shape.tiles * TILE_ROWS), np.float32)
    places = shape.packed_rows()
    for row, bias in zip(packed, biases, strict=True):
        row[places] = 0.0 if bias is None else bias
    return packed.reshape(-1)


def _columns(spec: WeightSpec, source: WeightSource, shape: MatrixShape) -> I32 | None:
    parts = [parts_of(matrix, source)[0] for matrix in spec.matrices]
    if not shape.filled and all(column_order(part) is None for part in parts):
        return None
    return np.concatenate([packed_columns(part, shape.cols) for part in parts])


def _matrix_jobs(
    spec: WeightSpec,
    source: WeightSource,
    packed: PackedMatrix,
    decoded: list[tuple[WeightPart, str]],
    room: ReadingRoom,
) -> list[Callable[[], None]]:
    """Pieces of at most ROWS_AT_ONCE rows, cut where blocks of 16 rows end. Parts in a layout that
    the kernels do not read go to `decoded`, with the dtype that they get."""
    jobs: list[Callable[[], None]] = []
    shape = packed.shape
    for index, matrix in enumerate(spec.matrices):
        place = Place(shape, packed.data.ctypes.data + index * shape.matrix_bytes)
        first = 0
        for part in parts_of(matrix, source):
            rows = part.shape[0]
            if part.layout != DENSE and shape.kind in VX_DTYPES:
                decoded.append((part, shape.kind))
            begin = 0
            while begin < rows:
                boundary = ((first + begin) // ROWS_AT_ONCE + 1) * ROWS_AT_ONCE
                end = min(rows, boundary - first)
                jobs.append(_piece(place, part, spec.offset, first, begin, end, room))
                begin = end
            first += rows
    return jobs


class Place(Record):
    """The address to which one matrix of a shape is packed."""

    shape: MatrixShape
    address: int


def _piece(
    matrix: Place,
    part: WeightPart,
    offset: float,
    first: int,
    begin: int,
    end: int,
    room: ReadingRoom,
) -> Callable[[], None]:
    """Packs rows of a part that begins at row `first` of the matrix."""
    shape = matrix.shape
    features = shape.rows // 2 if shape.gated else 0

    def pack_blocks() -> None:
        blocks = np.ascontiguousarray(part.rows(begin, end).buffers["weight"].in_memory(room).data)
        library().vx_pack_blocks(
            matrix.address,
            BLOCK_KINDS[shape.kind],
            shape.cols,
            features,
            blocks.ctypes.data,
            first + begin,
            end - begin,
        )

    def pack_mxfp4() -> None:
        rows = part.rows(begin, end)
        codes = np.ascontiguousarray(rows.buffers["weight"].in_memory(room).data)
        exponents = np.ascontiguousarray(rows.buffers["scale"].data)
        library().vx_pack_mxfp4(
            matrix.address,
            shape.cols,
            features,
            codes.ctypes.data,
            exponents.ctypes.data,
            first + begin,
            end - begin,
        )

    def pack_coded() -> None:
        if shape.kind == FLOAT8_KIND:
            rows = float8_rows(part, begin, end)
        else:
            rows = affine_rows(part, shape.kind, shape.cols, begin, end)
        library().vx_pack_coded(
            matrix.address,
            CODED_KINDS[shape.kind],
            shape.cols,
            features,
            rows.codes.ctypes.data,
            rows.scales.ctypes.data,
            None if rows.zeros is None else rows.zeros.ctypes.data,
            first + begin,
            end - begin,
        )

    def pack() -> None:
        values, kind = _values(part, offset, begin, end, room)
        library().vx_pack_rows(
            matrix.address,
            VX_DTYPES[shape.kind],
            shape.cols,
            features,
            values.ctypes.data,
            VX_DTYPES[kind],
            first + begin,
            end - begin,
        )

    if shape.kind in CODED_KINDS:
        return pack_coded
    if shape.kind not in BLOCK_KINDS:
        return pack
    return pack_mxfp4 if part.layout.is_mxfp4 else pack_blocks


def _values(
    part: WeightPart, offset: float, begin: int, end: int, room: ReadingRoom
) -> tuple[AnyArray, str]:
    """These rows, (rows, cols), with the name of a dtype that the packer reads."""
    if part.layout == DENSE and not offset:
        raw = part.rows(begin, end).buffers["weight"]
        if raw.dtype in VX_DTYPES:
            return np.ascontiguousarray(raw.in_memory(room).view()), raw.dtype
    values = part.dequantize(begin, end) + np.float32(offset)
    return np.ascontiguousarray(values, np.float32), "f32"


def _log_decoded(decoded: Sequence[tuple[WeightPart, str]]) -> None:
    """One line a load: what the memory is spent on."""
    if not decoded:
        return
    layouts = sorted({f"{part.layout.kind} ({part.layout.bits:g} bit)" for part, _ in decoded})
    stored = sum(math.prod(part.shape) * part.layout.bits / 8 for part, _ in decoded)
    used = sum(math.prod(part.shape) * ITEM_BYTES[kind] for part, kind in decoded)
    logger.info(
        "%d matrices stored as %s are dequantised to %s at load: %.1f MiB instead of %.1f MiB",
        len(decoded),
        ", ".join(layouts),
        decoded[0][1],
        used / (1 << 20),
        stored / (1 << 20),
    )


def _run(jobs: Sequence[Callable[[], None]], num_threads: int, progress: bool) -> None:
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for index, future in enumerate(futures):
                future.result()
                if progress and (index + 1 == len(futures) or index % 16 == 0):
                    show_progress("loading weights", index + 1, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class UnitRows(Record):
    """Arguments of vx_pack_coded."""

    codes: AnyArray  # (n, cols) uint8
    scales: F32  # (n, units)
    zeros: AnyArray | None  # (n, units) int16


def affine_rows(part: WeightPart, kind: str, cols: int, begin: int, end: int) -> UnitRows:
    """Rows of a part that has integers, `cols` packed columns with the input features in
    `column_order`."""
    rows, is_moved = part.coded_rows(begin, end), column_order(part) is not None
    order = packed_columns(part, cols)
    feature = order[:: COLS_OF[kind]]  # the first of each unit; behind all groups it is none
    if rows.group_of is None:
        group = feature // (part.shape[1] // rows.scales.shape[1])
    else:
        group = rows.group_of[feature]
    codes = rows.codes
    if is_moved or cols > part.shape[1]:
        codes = np.where(order < 0, np.uint8(0), codes[:, order])
    shape = (end - begin, len(feature))
    zeros = np.zeros(shape, np.int16) if rows.zeros is None else rows.zeros[:, group]
    return UnitRows(
        np.ascontiguousarray(codes, np.uint8),
        np.ascontiguousarray(rows.scales[:, group], np.float32),
        np.ascontiguousarray(zeros, np.int16),
    )


def float8_rows(part: WeightPart, begin: int, end: int) -> UnitRows:
    """Rows of a part of layout "fp8"."""
    if not isinstance(part, StoredPart):
        part, begin, end = part.rows(begin, end), 0, end - begin
    raw, options = part.buffers["scale"].in_memory(), part.layout.options
    scales = float8_to_f32(raw.view(), "f8e8m0") if raw.dtype == "u8" else raw.to_f32()  # type: ignore[arg-type]
    row, unit = np.arange(begin, end), np.arange(0, part.shape[1], FLOAT8_COLS)
    if options["strategy"] == "block":
        row, unit = row // int(options["block_rows"]), unit // int(options["block_cols"])
        found = scales[np.ix_(row, unit)]
    else:
        whole = np.broadcast_to(scales.reshape(-1, 1), (part.shape[0], len(unit)))
        found = whole[begin:end]
    codes = np.asarray(part.buffers["weight"].rows(begin, end).view())
    return UnitRows(np.ascontiguousarray(codes), np.ascontiguousarray(found, np.float32), None)
