"""What ranks read of a file: their own columns or rows, in every format, each byte once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.weights.files import FileRange, WeightFile
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import entry_of, share_of, transposed
from vllmx_models.formats.gguf.quantize.encoders import encoder_for
from vllmx_models.isq import Encoding, InSituSource
from vllmx_testing.synthetic import ArraySource

from ..null.quantization.checkpoints import open_part  # noqa: TID252 - no package to name
from . import quantizers
from .quantised_models import REGISTRY
from .test_weight_picks import made

Array = np.ndarray[Any, Any]
Place = tuple[int, int]
WIDE, TALL, FLAT_WORDS = (16, 32768), (4096, 256), (16384, 128)
"""Shapes of which a quarter of a row, or half of a word of all rows, is 4096 bytes at least: what
is less and lies between two runs is read too. AWQ has eight rows in a word."""
LAYOUTS = (
    "dense", "Q8_0", "Q4_K", "int8", "fp8", "fp8 blocks", "gptq", "gptq act-order", "awq", "w4a16",
    "mlx", "nvfp4",
)  # fmt: skip


def part_of(layout: str, shape: tuple[int, int], folder: Path) -> WeightPart:
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    match layout:
        case "w4a16":
            tensors, _ = quantizers.pack_quantized(values, bits=4, group_size=128)
            weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "symmetric": False}
            quantization = quantizers.ct_config(weights)
        case "mlx":
            tensors, _ = quantizers.mlx_affine(values, bits=4, group_size=64)
            quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
        case "nvfp4":
            tensors, _ = quantizers.nvfp4(values)
            quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        case _:
            return made(layout, values, folder)
    return open_part(folder, {f"m.{key}": array for key, array in tensors.items()}, quantization)


def in_file(part: WeightPart, path: Path) -> tuple[WeightPart, Place]:
    """The part with its buffers in a file, and where the largest one lies there."""
    data = {key: raw.data.tobytes() for key, raw in part.buffers.items()}
    path.write_bytes(b"".join(data.values()))
    file, at, buffers, places = WeightFile(path), 0, {}, []
    for key, raw in part.buffers.items():
        places.append((at, at + len(data[key])))
        buffers[key] = replace(raw, stored=file.range(*places[-1]))
        at = places[-1][1]
    return replace(part, buffers=buffers), max(places, key=lambda place: place[1] - place[0])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    found: list[Place] = []
    original = os.preadv

    def preadv(file: int, buffers: Sequence[memoryview], at: int) -> int:
        found.append((at, at + sum(map(len, buffers))))
        return original(file, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def halves(begin: int, end: int | None = None) -> list[Place]:
    """Two spans from `begin` to `end`, or from 0 to `begin`."""
    begin, end = (0, begin) if end is None else (begin, end)
    return [(begin, (begin + end) // 2), ((begin + end) // 2, end)]


def check(
    part: WeightPart,
    whole: Array,
    shares: list[RankShare],
    reads: list[Place],
    stored: WeightPart | None = None,
) -> Place:
    """Decodes the share of each rank in two steps. Gives how much they read, and how much of it
    more than once.

    Args:
        stored: what `part` is made of, where it is not what lies in the file.
    """
    found: list[Place] = []
    for share in shares:
        mine = share_of(part, share)
        rows = np.concatenate([np.arange(*run) for run in share.rows or ((0, len(whole)),)])
        expected = whole[rows][:, slice(*share.cols) if share.cols else slice(None)]
        half = len(expected) // 2
        reads.clear()
        for raw in (stored or part).buffers.values():
            assert isinstance(raw.stored, FileRange)
            raw.stored.file.kept.clear()
        parts = [mine.dequantize(0, half), mine.dequantize(half, len(expected))]
        np.testing.assert_array_equal(np.concatenate(parts), expected)
        found += set(reads)
    ends = sorted(found)
    twice = sum(max(0, end - begin) for (_, end), (begin, _) in pairwise(ends))
    return sum(end - begin for begin, end in found), twice


def of_place(reads: list[Place], place: Place) -> list[Place]:
    return [read for read in reads if place[0] <= read[0] and read[1] <= place[1]]


class OfPlace(list[Place]):
    """Reads within a range of the file, all else left out."""

    def __init__(self, all_reads: list[Place], place: Place) -> None:
        super().__init__()
        self._all, self._place = all_reads, place

    def clear(self) -> None:
        self._all.clear()

    def __iter__(self) -> Any:
        return iter(of_place(self._all, self._place))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns(layout: str, tmp_path: Path, reads: list[Place]) -> None:
    """Two ranks read each byte of the matrix once."""
    rows, cols = WIDE
    part, place = in_file(part_of(layout, WIDE, tmp_path), tmp_path / "buffers")
    spans = ((0, cols // 4), (cols // 4, cols))
    shares = [RankShare(rows, cols, cols=span) for span in spans]
    found = check(part, part.dequantize(), shares, OfPlace(reads, place))
    assert found == (place[1] - place[0], 0)
    if layout not in ("int8", "fp8"):  # their options name the width
        assert share_of(part, shares[0]).layout == part.layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows(layout: str, tmp_path: Path, reads: list[Place]) -> None:
    rows, cols = FLAT_WORDS if layout == "awq" else TALL
    part, place = in_file(part_of(layout, (rows, cols), tmp_path), tmp_path / "buffers")
    shares = [RankShare(rows, cols, (span,)) for span in halves(rows)]
    found = check(part, part.dequantize(), shares, OfPlace(reads, place))
    assert found == (place[1] - place[0], 0)


@pytest.mark.parametrize("layout", ["dense", "fp8 blocks", "gptq"])
def test_rows_of_a_fused_matrix(layout: str, tmp_path: Path, reads: list[Place]) -> None:
    """A stretch of each of two matrices that are one: what lies between is another rank's."""
    rows, cols = TALL
    part, place = in_file(part_of(layout, TALL, tmp_path), tmp_path / "buffers")
    first, second = halves(rows // 2), halves(rows // 2, rows)
    shares = [RankShare(rows, cols, spans) for spans in zip(first, second, strict=True)]
    found = check(part, part.dequantize(), shares, OfPlace(reads, place))
    assert found == (place[1] - place[0], 0)


@pytest.mark.parametrize("axis", ["rows", "cols"])
def test_an_entry_with_its_input_features_first(
    axis: str, tmp_path: Path, reads: list[Place]
) -> None:
    values = np.random.default_rng(4).standard_normal((3, 64, 4096)).astype(np.float32)
    raw = RawTensor("m", "f32", values.shape, values.view(np.uint8).reshape(-1))
    stack, _ = in_file(StoredPart("m", values.shape, DENSE, {"weight": raw}), tmp_path / "buffers")
    part, whole = transposed(entry_of(stack, 1)), np.ascontiguousarray(values[1].T)
    rows, cols = whole.shape
    shares = [RankShare(rows, cols, (span,)) for span in halves(rows)]
    if axis == "cols":
        shares = [RankShare(rows, cols, cols=span) for span in halves(cols)]
    assert check(part, whole, shares, reads, stack) == (whole.nbytes, 0)


def test_what_is_quantised_while_it_is_read(tmp_path: Path, reads: list[Place]) -> None:
    """A rank makes blocks of its own columns."""
    part, place = in_file(part_of("dense", WIDE, tmp_path), tmp_path / "buffers")
    source = ArraySource({})
    source._parts = {"m": part}
    encoding = Encoding("Q4_K", encoder_for(REGISTRY, "Q4_K"))
    quantised = InSituSource(source, {"m": encoding}).part("m")
    shares = [RankShare(*WIDE, cols=span) for span in halves(WIDE[1])]
    found = check(quantised, quantised.dequantize(), shares, reads, part)
    assert found == (place[1] - place[0], 0)
