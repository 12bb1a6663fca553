"""Files of weights: what is read, and what becomes of those that change meanwhile."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights import files as weight_files
from vllmx_core.weights.files import Bytes, KeptReads, ReadingRoom, WeightFile
from vllmx_core.weights.tensor import RawTensor

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_ranges_and_their_parts(path: Path) -> None:
    before = open_descriptors()
    file = WeightFile(path)
    assert file.num_bytes == len(CONTENT)
    assert file.read(3, 3).size == 0
    assert file.read(0, len(CONTENT)).tobytes() == CONTENT
    cut = file.range(10, 200).cut(5, 20)
    assert (cut.num_bytes, cut.read().tobytes()) == (15, CONTENT[15:30])
    assert cut.read().flags.writeable
    assert cut.read() is not cut.read()
    file.close()
    file.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("skipped_bytes", [1, 4096])
def test_runs_of_a_range(path: Path, monkeypatch: pytest.MonkeyPatch, skipped_bytes: int) -> None:
    """Columns, rows of them and columns of those, read one by one or with what lies between."""
    monkeypatch.setattr(weight_files, "_SKIPPED_BYTES", skipped_bytes)
    monkeypatch.setattr(weight_files, "_ROOM_BYTES", 200)
    matrix = np.frombuffer(CONTENT, np.uint8)[16:4016].reshape(50, 80)
    file = WeightFile(path)
    columns = file.range(16, 4016).columns(80, 20, 50)
    assert columns.num_bytes == 50 * 30
    room = np.zeros(2000, np.uint8)
    np.testing.assert_array_equal(columns.read(room).reshape(50, 30), matrix[:, 20:50])
    assert np.shares_memory(columns.read(room), room)
    rows = columns.cut(3 * 30, 9 * 30)
    np.testing.assert_array_equal(rows.read().reshape(6, 30), matrix[3:9, 20:50])
    fewer = rows.columns(30, 5, 30)
    np.testing.assert_array_equal(fewer.read().reshape(6, 25), matrix[3:9, 25:50])
    assert fewer.cut(25, 50) == file.range(16 + 4 * 80 + 25, 16 + 4 * 80 + 50)
    assert file.range(16, 4016).columns(80, 0, 80) == file.range(16, 4016)
    assert columns.cut(60, 60).num_bytes == 0
    assert columns.kept() is columns.kept()
    os.truncate(path, 3000)
    with pytest.raises(WeightFormatError, match="has 3000 now"):
        columns.read()
    file.close()


@pytest.mark.parametrize("stored", ["file", "memory"])
def test_columns_of_a_tensor(path: Path, stored: str) -> None:
    file = WeightFile(path)
    place = file.range(0, 192) if stored == "file" else file.read(0, 192)
    raw = RawTensor("t", "u32", (2, 6, 4), place)
    whole = raw.view()
    np.testing.assert_array_equal(raw.cols(1, 3).view(), whole[:, 1:3])
    np.testing.assert_array_equal(raw.cols(1, 3, axis=2).view(), whole[:, :, 1:3])
    np.testing.assert_array_equal(raw.rows(1, 2).cols(2, 6).view(), whole[1:2, 2:6])
    np.testing.assert_array_equal(raw.cols(2, 6).rows(1, 2).view(), whole[1:2, 2:6])
    assert raw.cols(0, 6) is raw
    file.close()


def test_calls_that_give_less_than_was_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_CALL_BYTES", 7)
    file = WeightFile(path)
    assert file.read(1, 1000).tobytes() == CONTENT[1:1000]
    file.close()


@pytest.mark.parametrize("size", [0, 10, 99, 100, 101, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_file_that_changed_its_size_is_refused(path: Path, size: int) -> None:
    file = WeightFile(path)
    os.truncate(path, size)
    with pytest.raises(WeightFormatError, match=rf"weights had {len(CONTENT)} .* has {size} now"):
        file.read(50, 100)
    file.close()


def test_a_file_that_shrinks_after_the_look_at_its_size_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WeightFile(path)
    monkeypatch.setattr(WeightFile, "_size", lambda self: len(CONTENT))
    os.truncate(path, 80)
    with pytest.raises(WeightFormatError, match="let nobody write it"):
        file.read(50, 100)
    file.close()


def test_a_failing_disk_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    file = WeightFile(path)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(WeightFormatError, match=re.escape(f"{path} cannot be read (Input/output")):
        file.read(0, 1)
    file.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were read of any file."""
    found: list[tuple[int, int]] = []
    original: Callable[..., Bytes] = WeightFile.read

    def read(self: WeightFile, begin: int, end: int, room: Bytes | None = None) -> Bytes:
        found.append((begin, end))
        return original(self, begin, end, room)

    monkeypatch.setattr(WeightFile, "read", read)
    return found


def test_kept_ranges_are_read_once_within_the_limit(
    path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "KEPT_BYTES", 250)
    kept = KeptReads()
    one, two = WeightFile(path, kept), WeightFile(path, kept)
    first, second, large = one.range(0, 100), two.range(0, 100), one.range(0, 1000)
    for _ in range(3):
        assert first.kept().tobytes() == second.kept().tobytes() == CONTENT[:100]
    assert reads == [(0, 100)] * 2
    assert large.kept() is large.kept()
    assert first.kept() is first.kept()
    assert reads == [(0, 100)] * 2 + [(0, 1000), (0, 100)]
    one.close()
    two.close()
    assert not kept._found


def test_rows_of_a_tensor_are_read_alone(path: Path, reads: list[tuple[int, int]]) -> None:
    file = WeightFile(path)
    raw = RawTensor("t", "f32", (8, 4), file.range(64, 192))
    assert raw.num_bytes == 128
    rows = raw.rows(2, 5)
    assert reads == []
    assert rows.to_f32().tobytes() == CONTENT[96:144]
    assert reads == [(96, 144)]
    whole = raw.in_memory()
    np.testing.assert_array_equal(whole.rows(2, 5).data, rows.data)
    assert raw.in_memory().data is whole.data
    assert whole.in_memory() is whole
    file.close()


def test_a_room_is_used_again(path: Path) -> None:
    file, room = WeightFile(path), ReadingRoom()
    raw = RawTensor("t", "u8", (len(CONTENT),), file.range(0, len(CONTENT)))
    first = raw.in_memory(room)
    assert first.data.tobytes() == CONTENT
    second = raw.rows(3, 9).in_memory(room)
    assert second.data.tobytes() == CONTENT[3:9]
    assert np.shares_memory(first.data, second.data)
    file.close()
