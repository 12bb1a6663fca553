"""Which integers the tensor cores take, and how they are put into their order piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import cols_of
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs.types import DTYPES
from vllmx_cuda.kernel_specs.w4 import ZERO_CODES, ZERO_MIDDLE
from vllmx_cuda.matrices import pieces, w4
from vllmx_cuda.matrices.form import Target
from vllmx_cuda.matrices.w4_packing import Packing, packed, packed_rows, packing_of
from vllmx_testing.parts import IntegerLayout

ROWS, COLS = 112, 128
TARGET = Target("bf16", 90)


def integers(
    shape: tuple[int, int] = (ROWS, COLS),
    *,
    bits: int = 4,
    group: int | None = 32,
    group_of: Any = None,
    zero: int | None = None,
    scales: str = "f16",
) -> WeightPart:
    """Random codes; zeros are stored unless `zero` is the only one."""
    random = np.random.default_rng(0)
    groups = -(-shape[1] // (group or shape[1]))
    codes = random.integers(0, 1 << bits, shape).astype(np.uint8)
    factors = random.uniform(1, 2, (shape[0], groups)).astype(np.float16)
    zeros = random.integers(0, 1 << bits, (shape[0], groups)) if zero is None else None

    def coded(rows: slice) -> CodedRows:
        some = factors[rows].astype(np.float32)
        used = np.full((len(some), groups), zero) if zeros is None else zeros[rows]
        return CodedRows(codes[rows], some, used, group_of)

    raw = RawTensor("s", scales, factors.shape, factors.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    buffers = {"scales": raw}
    if zeros is not None:
        buffers["qzeros"] = raw
    if group_of is not None:
        data = np.asarray(group_of, np.int32).view(np.uint8)
        buffers["g_idx"] = RawTensor("g", "i32", (shape[1],), data)
    layout = IntegerLayout(bits, group, {"act_order": group_of is not None}, coded)
    return StoredPart("w", shape, layout, buffers)


SHUFFLED = np.random.default_rng(1).permutation(np.arange(COLS) // 32).astype(np.int32)
UNEVEN = np.random.default_rng(1).integers(0, 4, COLS).astype(np.int32)
THIN = np.random.default_rng(1).permutation(COLS).astype(np.int32) // 8
REFUSED = {
    "rows": integers((40, COLS)),
    "columns": integers((ROWS, 80), group=None),
    "small groups": integers(group=16),
    "groups of 96": integers((ROWS, 192), group=96),
    "too many bits": integers(bits=9, zero=0),
    "shuffled groups of 8": integers(group=8, group_of=THIN),
}


def test_a_rank_s_columns_have_zeros_of_their_own() -> None:
    """A row with the middle alone, as the first of few groups may have, tells nothing of others."""
    part = integers(zero=8)
    assert packing_of(part).zero == ZERO_MIDDLE  # type: ignore[union-attr]
    own = packing_of(cols_of(part, 32, 64))
    assert own is not None
    assert own.zero == ZERO_CODES
    assert packed_rows(cols_of(part, 32, 64), own, 0, ROWS).shape[0] == ROWS // 16


@pytest.mark.parametrize("part", REFUSED.values(), ids=REFUSED.keys())
def test_the_rest_is_left_to_other_forms(part: WeightPart) -> None:
    assert w4.w4(part, TARGET) is None


def test_packings() -> None:
    found = packing_of(integers())
    assert found is not None
    assert (found.bits, found.scale, found.zero, found.group_shift) == (
        4,
        DTYPES["f16"],
        ZERO_CODES,
        5,
    )
    assert not found.order
    whole = packing_of(integers(bits=3, group=None, zero=8, scales="bf16"))
    assert whole is not None
    assert (whole.bits, whole.scale, whole.zero) == (4, DTYPES["bf16"], ZERO_MIDDLE)
    assert (COLS - 1) >> whole.group_shift == 0
    other = packing_of(integers(bits=5, zero=3))
    assert other is not None
    assert (other.bits, other.zero) == (8, ZERO_CODES)
    ordered = packing_of(integers(group_of=SHUFFLED))
    assert ordered is not None
    assert ordered.columns is not None
    assert (SHUFFLED[ordered.columns] == np.arange(COLS) // 32).all()


def test_uneven_groups_are_filled_up() -> None:
    """Filling columns have codes of their group; each 32 columns have its scale and zero."""
    part = integers(group_of=UNEVEN)
    packing = packing_of(part)
    assert packing is not None
    assert packing.filled
    assert packing.group_shift == 5
    columns = packing.columns
    assert columns is not None
    features = np.where(columns < 0, ~columns, columns)
    np.testing.assert_array_equal(np.sort(columns[columns >= 0]), np.arange(COLS))
    groups = UNEVEN[features].reshape(-1, 32)
    assert (groups == groups[:, :1]).all()
    rows = part.coded_rows(0, ROWS)
    assert rows.zeros is not None
    factors = (values[:, groups[:, 0]] for values in (rows.scales, rows.zeros))
    want = packed(rows.codes[:, features], *factors, packing)
    np.testing.assert_array_equal(packed_rows(part, packing, 0, ROWS), want)
    assert want.shape == (ROWS // 16, packing.row_tile_bytes(COLS))


def test_groups_of_a_size_that_kernels_lack_are_filled_up() -> None:
    group_of = np.random.default_rng(1).permutation(192).astype(np.int32) // 96
    found = packing_of(integers((ROWS, 192), group=96, group_of=group_of))
    assert found is not None
    assert found.filled
    assert found.width(192) == 192


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are whole tiles, each unpacked some rows at a time, behind another part."""
    part = integers(group_of=SHUFFLED)
    form = w4.w4(part, TARGET)
    assert form is not None
    size = form.packing.row_tile_bytes(COLS)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3 * size + 5)
    monkeypatch.setattr(w4, "_ROWS_AT_ONCE", 32)
    rows = ROWS + 32
    buffer = np.full(form.num_bytes(rows, COLS), 255, np.uint8)
    data = Memory(0, buffer.size, buffer)
    made = [
        *form.pieces(integers((32, COLS), group_of=SHUFFLED), data, 0, rows),
        *form.pieces(part, data, 32, rows),
    ]
    for piece in made:
        at = piece.target.address
        piece.fill(buffer[at : at + piece.target.num_bytes])
    assert len(made) == 1 + 1 + 3
    tiles, rest = np.split(buffer, [rows // 16 * size])
    np.testing.assert_array_equal(
        tiles[2 * size :], packed_rows(part, form.packing, 0, ROWS).reshape(-1)
    )
    counters, order = np.split(rest, [-4 * COLS])
    assert not counters.any()
    np.testing.assert_array_equal(SHUFFLED[order.view(np.int32)], np.arange(COLS) // 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_has_its_place(bits: int) -> None:
    """The places are those of `kernels/w4_codes.h`, code by code."""
    part = integers(bits=bits)
    packing = packing_of(part)
    assert packing is not None
    data, codes = packed_rows(part, packing, 0, ROWS), part.coded_rows(0, ROWS).codes
    row, col = np.meshgrid(np.arange(ROWS), np.arange(COLS), indexing="ij")
    lane = 4 * (row % 8) + col % 32 // 8
    half, step, pair, odd, high = col % 64 // 32, col // 4 % 2, col // 2 % 2, col % 2, row % 16 // 8
    if bits == 4:
        bit = 32 * (2 * half + step) + 4 * (high + 2 * pair + 4 * odd)
        byte = col // 64 * 512 + lane * 16 + bit // 8
        found = data[row // 16, byte] >> (bit % 8) & 15
    else:
        byte = col // 64 * 1024 + half * 512 + lane * 16 + 4 * (2 * step + pair) + 2 * high + odd
        found = data[row // 16, byte]
    np.testing.assert_array_equal(found, codes)


def test_every_code_of_six_bits_has_its_place() -> None:
    codes = np.random.default_rng(0).integers(0, 64, (ROWS, COLS)).astype(np.uint8)
    packing = Packing(6, DTYPES["f16"], ZERO_MIDDLE, 4)
    data = packed(codes, np.ones((ROWS, COLS // 16)), None, packing)
    assert data.shape == (ROWS // 16, packing.row_tile_bytes(COLS))
    row, col = np.meshgrid(np.arange(ROWS), np.arange(COLS), indexing="ij")
    lane = 4 * (row % 8) + col % 16 // 4
    half, step, pair, odd, high = (
        col % 64 // 32,
        col // 16 % 2,
        col // 2 % 2,
        col % 2,
        row % 16 // 8,
    )
    low = 32 * (2 * half + step) + 4 * (high + 2 * pair + 4 * odd)
    tile = col // 64 * 768
    found = data[row // 16, tile + lane * 16 + low // 8] >> (low % 8) & 15
    bit = 32 * half + 2 * (high + 2 * pair + 4 * step) + 16 * odd
    found |= (data[row // 16, tile + 512 + lane * 8 + bit // 8] >> (bit % 8) & 3) << 4
    np.testing.assert_array_equal(found, codes)
