"""The reader of GGUF headers: every kind of value, and every way to lie."""

from __future__ import annotations

import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.errors import ModelNotFoundError, WeightFormatError
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.metadata import MAX_INNER_ARRAYS, StringArray

from . import raw
from .raw import ARRAY, BOOL, STRING, U32, entry, header, tensor, write

VALUES: dict[str, tuple[int, Any]] = {
    "u8": (raw.U8, 200), "i8": (raw.I8, -100), "u16": (raw.U16, 60000), "i16": (raw.I16, -3),
    "u32": (raw.U32, 1 << 31), "i32": (raw.I32, -7), "f32": (raw.F32, 1.5), "bool": (BOOL, True),
    "string": (STRING, "näh"), "u64": (raw.U64, 1 << 63), "i64": (raw.I64, -1),
    "f64": (raw.F64, math.pi), "empty": (STRING, ""),
}  # fmt: skip


def opened(path: Path) -> GGUFFile:
    return GGUFFile(path)


def damaged(tmp_path: Path, head: bytes, data: bytes = b"") -> None:
    GGUFFile(write(tmp_path / "x.gguf", head, data)).close()


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_kind(tmp_path: Path, version: int) -> None:
    entries = [entry(name, kind, item) for name, (kind, item) in VALUES.items()]
    file = opened(write(tmp_path / "x.gguf", header(entries, version=version)))
    assert dict(file.metadata) == {name: item for name, (_, item) in VALUES.items()}
    assert type(file.metadata["bool"]) is bool
    assert not file.tensors
    file.close()
    assert not file.metadata


def test_arrays_of_every_kind(tmp_path: Path) -> None:
    entries = [entry(name, ARRAY, (kind, [item] * 3)) for name, (kind, item) in VALUES.items()]
    entries += [
        entry("nested", ARRAY, (ARRAY, [(U32, [1, 2]), (STRING, ["a"]), (ARRAY, [(BOOL, [0])])])),
        entry("none", ARRAY, (STRING, [])),
    ]
    file = opened(write(tmp_path / "x.gguf", header(entries)))
    for name, (kind, item) in VALUES.items():
        array = file.metadata[name]
        assert list(array) == [item] * 3
        assert isinstance(array, StringArray if kind == STRING else np.ndarray)
        if kind != STRING:
            assert not array.flags.writeable
    first, second, third = file.metadata["nested"]
    assert (list(first), list(second), list(third[0])) == ([1, 2], ["a"], [False])
    assert len(file.metadata["none"]) == 0
    file.close()


def test_a_file_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b c", "ü"])
    arrays = {
        "one": np.arange(7, dtype=np.float32),
        "two": np.arange(12, dtype=np.float16).reshape(3, 4),
        "four": np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5),
        "long": np.arange(3, dtype=np.int64),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = opened(path)
    assert list(file.metadata["tokenizer.ggml.tokens"]) == ["a", "b c", "ü"]
    for name, array in arrays.items():
        info = file.tensors[name]
        assert (info.shape, info.start % 64) == (array.shape, 0)
        np.testing.assert_array_equal(file.data(name), array.reshape(-1).view(np.uint8))
    file.close()


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    file = opened(write(tmp_path / "x.gguf", header([], [tensor("a", [4])]), b"\1" * 16))
    view = file.data("a")
    file.close()
    assert view.tolist() == [1] * 16


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGML" + b"\0" * 40, "is not a GGUF file"),
        (header(version=1), "version 1, versions 2 and 3"),
        (header(version=0), "version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_tensors=1 << 60), "1152921504606846976 tensors"),
        (header(num_tensors=5), "5 tensors are claimed"),
        (header(num_entries=1 << 50), "metadata entries"),
        (header(num_entries=3), r"byte \d+: "),
        (header([raw.string("k" * 70000)], num_entries=1), "metadata key has 70000 bytes"),
        (header([struct.pack("<Q", 1 << 63)], num_entries=1), "a metadata key has"),
        (header([raw.string(b"\xff\xfe")], num_entries=1), "not UTF-8"),
        (header([entry("k", U32, 1)] * 2), "'k' is there twice"),
        (header([raw.string("k") + struct.pack("<I", 13)]), "unknown value type 13"),
        (header([entry("k", BOOL, 2)]), "truth value of 2"),
        (header([entry("k", ARRAY, (BOOL, [0, 9]))]), "neither 0 nor 1"),
        (header([raw.string("k") + struct.pack("<IIQ", ARRAY, 99, 1)]), "unknown value type 99"),
        (header([raw.string("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 62)]), "needs"),
        (header([raw.string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 62)]), "claims"),
        (
            header([raw.string("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 62)]),
            "a string of",
        ),
        (header([raw.string("k") + struct.pack("<IQ", STRING, 1 << 40)]), "at most"),
        (
            header([entry("k", ARRAY, (ARRAY, [(ARRAY, [(ARRAY, [(ARRAY, [(U32, [])])])])]))]),
            "more than 4 deep",
        ),
        (header([entry("general.alignment", U32, 0)]), "power of two"),
        (header([entry("general.alignment", U32, 48)]), "power of two"),
        (header([entry("general.alignment", STRING, "32")]), "power of two"),
        (header([], [tensor("a" * 300, [4])]), "name has 300 bytes"),
        (header([], [tensor("a", [])]), "0 dimensions"),
        (header([], [tensor("a", [1] * 5)]), "5 dimensions"),
        (header([], [raw.string("a") + struct.pack("<I", 1 << 31) + b"\0" * 40]), "dimensions"),
        (header([], [tensor("a", [0, 4])]), r"impossible shape \[4, 0\]"),
        (header([], [tensor("a", [1 << 40, 1 << 40])]), "impossible shape"),
        (header([], [tensor("a", [4], kind=4)]), "unknown type 4"),
        (header([], [tensor("a", [4], kind=1 << 31)]), "unknown type"),
        (header([], [tensor("a", [256], kind=19)]), "stored as IQ1_S"),
        (header([], [tensor("a", [40, 2], kind=8)]), "multiple of 32"),
        (header([], [tensor("a", [64], kind=8)]), "one dimension, which Q8_0 is not made for"),
        (header([], [tensor("a", [4], offset=8)]), "multiple of the alignment"),
        (header([], [tensor("a", [4], offset=1 << 62)]), "truncated"),
        (header([], [tensor("a", [64])]), "truncated"),
        (header([], [tensor("a", [4]), tensor("a", [4], offset=32)]), "'a' is there twice"),
        (header([], [tensor("a", [16]), tensor("b", [4], offset=32)]), "'a' and 'b' overlap"),
        (header([], [tensor("a", [4]), tensor("b", [4])]), "overlap"),
    ],
)
def test_lies_are_named(tmp_path: Path, head: bytes, message: str) -> None:
    with pytest.raises(WeightFormatError, match=message) as caught:
        damaged(tmp_path, head, b"\0" * 128)
    assert "x.gguf" in caught.value.message


def test_short_missing_and_empty_files(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"GGUF\3\0\0\0"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(WeightFormatError, match="fewer than the 24"):
            opened(tmp_path / "x.gguf")
    with pytest.raises(ModelNotFoundError, match="cannot be opened"):
        opened(tmp_path / "y.gguf")
    with pytest.raises(ModelNotFoundError, match="cannot be opened"):
        opened(tmp_path)


def test_strings_are_checked_when_they_are_read(tmp_path: Path) -> None:
    file = opened(
        write(tmp_path / "x.gguf", header([entry("k", ARRAY, (STRING, [b"a", b"\xff"]))]))
    )
    with pytest.raises(WeightFormatError, match=r"entry of 'k' is not UTF-8"):
        list(file.metadata["k"])
    file.close()


def test_many_small_things_stay_small(tmp_path: Path) -> None:
    """Inner arrays and empty strings up to their limits, and above."""
    inner = struct.pack("<IQ", U32, 0) * MAX_INNER_ARRAYS
    nested = raw.string("n") + struct.pack("<IIQ", ARRAY, ARRAY, MAX_INNER_ARRAYS) + inner
    strings = raw.string("s") + struct.pack("<IIQ", ARRAY, STRING, 50_000) + b"\0" * 400_000
    path = write(tmp_path / "x.gguf", header([nested, strings]))
    tracemalloc.start()
    file = opened(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file.metadata["n"]) == MAX_INNER_ARRAYS
    assert len(file.metadata["s"]) == 50_000
    assert peak_bytes < 64 << 20
    file.close()
    one_more = entry("m", ARRAY, (ARRAY, [(U32, [])]))
    with pytest.raises(WeightFormatError, match="0 are left"):
        damaged(tmp_path, header([nested, one_more]))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    entries = [entry(name, kind, item) for name, (kind, item) in VALUES.items()]
    entries += [entry(f"{n}s", ARRAY, (kind, [item] * 4)) for n, (kind, item) in VALUES.items()]
    tensors = [tensor("a", [32, 2], 8), tensor("b", [8], 0, 96), tensor("c", [4, 4], 1, 128)]
    folder = tmp_path_factory.mktemp("damaged")
    path = write(folder / "x.gguf", header(entries, tensors), b"\7" * 160)
    return path.read_bytes(), path


@settings(max_examples=300)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 2000),
            st.one_of(
                st.integers(0, 255).map(lambda v: bytes([v])),
                st.sampled_from([0, 1, 255, 1 << 31, (1 << 32) - 1]).map(
                    lambda v: struct.pack("<I", v)
                ),
                st.sampled_from([1, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1]).map(
                    lambda v: struct.pack("<Q", v)
                ),
            ),
        ),
        max_size=4,
    ),
    cut=st.one_of(st.none(), st.integers(0, 2000)),
)
def test_damage_is_an_error_or_harmless(
    good: tuple[bytes, Path], changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    content, path = bytearray(good[0]), good[1]
    for at, patch in changes:
        at %= len(content)
        content[at : at + len(patch)] = patch
    path.write_bytes(bytes(content) if cut is None else bytes(content[:cut]))
    try:
        file = GGUFFile(path)
    except WeightFormatError:
        return
    for name, info in file.tensors.items():
        assert len(file.data(name)) == info.num_bytes
    for item in file.metadata.values():
        if isinstance(item, StringArray):
            try:
                assert len(list(item)) == len(item)
            except WeightFormatError as error:
                assert "UTF-8" in error.message  # noqa: PT017 - either way is right
    file.close()
