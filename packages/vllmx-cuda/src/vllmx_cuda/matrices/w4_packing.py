"""Integers of 4, 6 or 8 bits, put into the order of `kernels/w4_codes.h`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import I32, AnyArray
from vllmx_core.weights.coded import FILLED_UNIT, features_of, filled_order
from vllmx_core.weights.part import Integers, StoredPart, WeightPart
from vllmx_core.weights.tensor import f32_to_bf16

from vllmx_cuda.kernel_specs.types import DTYPES, ceil_div
from vllmx_cuda.kernel_specs.w4 import (
    BLOCK_FORMS,
    GROUP_COLS,
    ONE_GROUP,
    TILE_COLS,
    TILE_ROWS,
    ZERO_CODES,
    ZERO_MIDDLE,
    record_bytes,
    tile_bytes,
)
from vllmx_cuda.matrices.w4_gguf import block_type

U8 = npt.NDArray[np.uint8]
_MOST_ZERO = {4: 127, 8: 255}
"""The greatest zero that the kernels take away from a code exactly, by bits."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The facts about a matrix that the kernels need."""

    bits: int
    scale: int
    """Values of VX_SCALE and VX_ZERO."""
    zero: int
    group_shift: int
    """Column c has the factors of group c >> group_shift."""
    order: bytes = b""
    """Input feature of each column, int32; empty: in order."""
    filled: bool = False
    """True if groups are uneven and filled up, so that `order` is a `filled_order`."""

    @property
    def options(self) -> dict[str, int]:
        return {"VX_BITS": self.bits, "VX_SCALE": self.scale, "VX_ZERO": self.zero}

    @property
    def columns(self) -> I32 | None:
        """`order` as an array (width,)."""
        return np.frombuffer(self.order, np.int32) if self.order else None

    def width(self, cols: int) -> int:
        """The columns of `cols` input features."""
        return len(self.order) // 4 or cols

    def row_tile_bytes(self, cols: int) -> int:
        """Bytes that 16 rows of `cols` input features take."""
        cols = self.width(cols)
        groups = ((cols - 1) >> self.group_shift) + 1
        codes = ceil_div(cols, TILE_COLS) * tile_bytes(self.bits)
        return codes + groups * record_bytes(self.scale, self.zero)


def packing_of(part: WeightPart) -> Packing | None:
    """None where the kernels do not have it: more than 8 bits, rows that are not whole tiles,
    columns in order whose groups are not a power of two of at least 32; shuffled ones in groups
    that take 16 bits a weight once they are filled up."""
    if len(part.shape) != 2 or part.shape[0] % TILE_ROWS:
        return None
    blocks = block_type(part)
    if blocks is not None:
        bits, zero, shift = BLOCK_FORMS[blocks]
        return Packing(bits, DTYPES["f16"], zero, shift)
    return _coded_packing(part)


def _coded_packing(part: WeightPart) -> Packing | None:
    """The packing of a part that hands over integers."""
    if not part.layout.has_codes or part.layout.bits > 8:
        return None
    cols = part.shape[1]
    group = part.layout.group_size or cols
    shift = ONE_GROUP if group >= cols else group.bit_length() - 1
    whole = cols % GROUP_COLS == 0 and (group >= cols or group == 1 << shift >= GROUP_COLS)
    if not whole and not part.is_shuffled:
        return None
    bits = 4 if part.layout.bits <= 4 else 8
    packing = Packing(bits, _scale_type(part), _zero_kind(part, bits), shift)
    return _ordered_packing(part, packing, group if whole else 0) if part.is_shuffled else packing


def _ordered_packing(part: WeightPart, packing: Packing, group: int) -> Packing | None:
    """The packing of a part whose columns are sorted first.

    Args:
        group: the size of its groups, if the kernels have it; else 0.
    """
    cols, group_of = part.shape[1], part.group_of
    assert group_of is not None
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if group and (group_of[order] == np.arange(cols) // group).all():
        return replace(packing, order=order.tobytes())
    order, shift = filled_order(group_of), FILLED_UNIT.bit_length() - 1
    filled = replace(packing, group_shift=shift, order=order.tobytes(), filled=True)
    return filled if filled.row_tile_bytes(cols) < 2 * TILE_ROWS * cols else None


def _scale_type(part: WeightPart) -> int:
    """The type that the checkpoint has them in: nothing is rounded. A part that is made would be
    made by looking, and has float32."""
    if not isinstance(part, StoredPart):
        return DTYPES["f32"]
    kinds = {raw.dtype for key, raw in part.buffers.items() if key.startswith("scale")}
    kind = kinds.pop() if len(kinds) == 1 else "f32"
    return DTYPES.get(kind, DTYPES["f32"])


def _zero_kind(part: WeightPart, bits: int) -> int:
    """The kind of zero points. Where the checkpoint stores none, one row tells; not where a part is
    computed from another one, whose buffers it does not have: a row of it may have the middle alone
    by chance."""
    if isinstance(part.layout, Integers):
        return ZERO_CODES
    if isinstance(part, StoredPart) and any("zero" in key for key in part.buffers):
        return ZERO_CODES
    zeros = part.coded_rows(0, 1).zeros
    middle = zeros is not None and (zeros == 1 << (bits - 1)).all()
    return ZERO_MIDDLE if middle else ZERO_CODES


def packed(codes: U8, scales: AnyArray, zeros: AnyArray | None, packing: Packing) -> U8:
    """(row tiles, bytes) of rows of codes (n, cols), scales and zeros or minima (n, groups)."""
    factors = [_by_tile(_as_scales(scales, packing.scale))]
    if packing.zero != ZERO_MIDDLE:
        assert zeros is not None
        whole = packing.zero == ZERO_CODES
        kind = zeros.astype(np.uint8) if whole else _as_scales(zeros, packing.scale)
        factors.append(_by_tile(kind))
    records = np.concatenate(factors, axis=2)
    ordered = _ordered(codes, packing.bits)
    return np.concatenate([ordered, records.reshape(len(ordered), -1)], axis=1)


def _as_scales(values: AnyArray, kind: int) -> AnyArray:
    """Converts scales to the type of VX_SCALE; bf16 as uint16."""
    if kind == DTYPES["bf16"]:
        return f32_to_bf16(values.astype(np.float32))
    return values.astype(np.float16 if kind == DTYPES["f16"] else np.float32)


def _ordered(codes: U8, bits: int) -> U8:
    """(row tiles, bytes) codes as the device has them; rows and columns padded to whole tiles."""
    rows, cols = codes.shape
    padding = ((0, -rows % TILE_ROWS), (0, -cols % TILE_COLS))
    if any(pad for _, pad in padding):
        codes = np.pad(codes, padding)
    tiles = (len(codes) // TILE_ROWS, codes.shape[1] // TILE_COLS)
    if bits == 6:
        return _six_bits(codes, tiles)
    # a row is h (0 or 8 more) and g, a column is half, quarter, step, pair, odd
    if bits == 4:
        return _four_bits(codes, tiles).reshape(tiles[0], -1)
    odds = np.ascontiguousarray(codes).view("<u2").reshape(tiles[0], 2, 8, tiles[1], 2, 4, 4)
    odds = odds.transpose(0, 3, 4, 2, 5, 6, 1)
    return np.ascontiguousarray(odds).reshape(tiles[0], -1).view(np.uint8)


def _four_bits(codes: U8, tiles: tuple[int, int]) -> U8:
    """(row tiles, tiles, bytes)."""
    split = np.ascontiguousarray(codes).view("<u4").reshape(tiles[0], 2, 8, -1)
    words = split[:, 1] << np.uint32(4)
    words |= split[:, 0]  # (row tiles, g, columns / 4)
    middle = words >> np.uint32(8)  # pair and odd change places: the two bytes in the middle
    middle ^= words
    middle &= np.uint32(0xFF00)
    words ^= middle
    middle <<= np.uint32(8)
    words ^= middle
    steps = words.view("<u8").reshape(tiles[0], 8, tiles[1], 2, 4).transpose(0, 2, 1, 4, 3)
    return np.ascontiguousarray(steps).reshape(*tiles, -1).view(np.uint8)


def _six_bits(codes: U8, tiles: tuple[int, int]) -> U8:
    """(row tiles, bytes). A column is half, step, quarter, pair, odd: once steps and quarters have
    changed places, the low bits are as codes of 4 bits."""
    runs = np.ascontiguousarray(codes).view("<u4").reshape(len(codes), -1, 2, 4)
    turned = np.ascontiguousarray(runs.transpose(0, 1, 3, 2)).reshape(len(codes), -1)
    low = _four_bits(turned.view(np.uint8) & np.uint8(15), tiles)
    return np.concatenate([low, _high_bits(turned, tiles)], axis=2).reshape(tiles[0], -1)


def _high_bits(runs: AnyArray, tiles: tuple[int, int]) -> U8:
    """(row tiles, tiles, bytes) the upper two of 6 bits, out of u32 of 4 columns."""
    words = runs >> np.uint32(4)  # pair, odd
    odd = words >> np.uint32(8) & np.uint32(0x00030003)
    words &= np.uint32(0x00030003)
    for half in (words, odd):  # the second pair, 16 bits up, goes 4 bits up
        half |= half >> np.uint32(12)
        half &= np.uint32(0x33)
    words |= odd << np.uint32(16)
    split = words.reshape(tiles[0], 2, 8, tiles[1], 2, 4, 2)  # h, g, tile, half, quarter, step
    found = split[:, 0, ..., 0] | split[:, 1, ..., 0] << np.uint32(2)
    found |= (split[:, 0, ..., 1] | split[:, 1, ..., 1] << np.uint32(2)) << np.uint32(8)
    lanes = np.ascontiguousarray(found.transpose(0, 2, 1, 4, 3))  # tile, g, quarter, half
    return lanes.reshape(*tiles, -1).view(np.uint8)


def _by_tile(values: AnyArray) -> U8:
    """(row tiles, groups, bytes of 16 values)."""
    rows, groups = values.shape
    padded = np.pad(values, ((0, -rows % TILE_ROWS), (0, 0)))
    tiles = padded.reshape(-1, TILE_ROWS, groups).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(np.uint8)


def packed_rows(part: WeightPart, packing: Packing, begin: int, end: int) -> U8:
    """Some rows of a part that hands over integers, from a multiple of 16 on.

    Raises:
        WeightFormatError: zeros that no such integer can have, scales that are not finite.
    """
    rows = part.coded_rows(begin, end)
    codes, scales, zeros = rows.codes, rows.scales, rows.zeros
    if packing.columns is not None:
        features = features_of(packing.columns)
        codes = codes[:, features]
        if packing.filled:
            scales, zeros = rows.factors(features[::FILLED_UNIT])
    if zeros is None:
        zeros = np.zeros(scales.shape, np.uint8)
    low, high = _zeros_of(packing)
    for zero in (int(zeros.min()), int(zeros.max())):
        if not low <= zero <= high:
            raise zero_refusal(part, packing, zero)
    if not np.isfinite(scales).all():
        raise scale_refusal(part, float(scales[~np.isfinite(scales)][0]))
    return packed(codes, scales, zeros, packing)


def _zeros_of(packing: Packing) -> tuple[int, int]:
    """The least and the greatest."""
    middle = 1 << (packing.bits - 1)
    return (middle, middle) if packing.zero == ZERO_MIDDLE else (0, _MOST_ZERO[packing.bits])


def zero_refusal(part: WeightPart, packing: Packing, zero: int) -> WeightFormatError:
    low, high = _zeros_of(packing)
    return WeightFormatError(
        f"tensor {part.name!r} has a zero point of {zero}, of its {packing.bits}-bit integers they"
        f" are expected within {low} and {high}: the checkpoint is damaged or of another format"
    )


def scale_refusal(part: WeightPart, scale: float) -> WeightFormatError:
    return WeightFormatError(
        f"tensor {part.name!r} has a scale of {scale}, which is not finite: the checkpoint is"
        " damaged"
    )
