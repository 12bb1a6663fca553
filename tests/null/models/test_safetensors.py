"""The safetensors reader against the reference package, and against damaged files."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.errors import ModelNotFoundError, VllmxError, WeightFormatError
from vllmx_core.weights.part import DENSE
from vllmx_models.formats.safetensors import open_checkpoint, open_weights
from vllmx_models.formats.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile

RNG = np.random.default_rng(1)
CONFIG = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def opened(path: Path) -> None:
    SafetensorsFile(path).close()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("<f4", "f32"), ("<f2", "f16"), ("<f8", "f64"), ("<i8", "i64"), ("<i4", "i32"), ("<i2", "i16"),
     ("i1", "i8"), ("u1", "u8"), ("?", "bool")],
)  # fmt: skip
def test_values_as_the_reference_package_wrote_them(tmp_path: Path, dtype: str, name: str) -> None:
    tensors = {
        "b.matrix": (RNG.normal(size=(5, 3)) * 50).astype(dtype),
        "a.vector": (RNG.normal(size=7) * 50).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "scalar": np.array(3, dtype),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_weights(tmp_path)
    assert set(source.names()) == set(tensors)
    for key, value in tensors.items():
        part = source.part(key)
        assert (part.layout, part.shape) == (DENSE, value.shape)
        raw = part.buffers["weight"]
        assert raw.dtype == name
        np.testing.assert_array_equal(raw.view(), value)
        np.testing.assert_array_equal(part.dequantize(), value.astype(np.float32))
    source.close()


def test_bf16_and_fp8_words(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38, 2**-130], np.float32)
    words = (values.view(np.uint32) >> 16).astype("<u2")
    header = {"x": entry("BF16", [2, 2], [0, 8]), "y": entry("F8_E4M3", [3], [8, 11])}
    path = write(tmp_path / "model.safetensors", header, words.tobytes() + b"\x38\x01\xff")
    source = open_weights(path)
    expected = (words.astype(np.uint32) << 16).view(np.float32).reshape(2, 2)
    np.testing.assert_array_equal(source.part("x").dequantize(), expected)
    assert source.part("y").buffers["weight"].view().tolist() == [0x38, 0x01, 0xFF]
    source.close()


def test_what_was_read_outlives_close(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": np.arange(4.0)}, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    view = source.part("x").buffers["weight"].view()
    source.close()
    source.close()
    assert view.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [0, 3, 7, 8, 40, 100, -1])
def test_truncated_file_names_both_sizes_and_the_remedy(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": np.zeros((20, 20), np.float32)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(WeightFormatError) as caught:
        open_weights(tmp_path)
    message = caught.value.message
    assert str(path) in message
    assert "download" in message
    assert f"{len(whole[:cut])} " in message
    if cut == -1:
        assert f"{len(whole)} bytes are expected" in message


HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{nonsense", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "no object": ([1], "an object is needed"),
    "deep": (b"[" * 200_000, "too deeply"),
    "twice": (b'{"x": {}, "x": {}}', "occurs twice"),
    "entry is a list": ({"x": []}, "not dtype, shape and data_offsets"),
    "entry lacks a key": ({"x": {"dtype": "U8", "shape": [4]}}, "not dtype, shape"),
    "entry has one more": ({"x": {**entry(), "more": 1}}, "not dtype, shape"),
    "unknown dtype": ({"x": entry("F128")}, "unknown dtype 'F128'"),
    "dtype is a number": ({"x": entry(7)}, "unknown dtype"),  # type: ignore[arg-type]
    "negative size": ({"x": entry(shape=[-4])}, "impossible shape"),
    "fractional size": ({"x": entry(shape=[4.0])}, "impossible shape"),
    "boolean size": ({"x": entry(shape=[True, 4])}, "impossible shape"),
    "huge size": ({"x": entry(shape=[1 << 62])}, "impossible shape"),
    "overflowing product": ({"x": entry(shape=[1 << 40] * 8)}, "impossible shape"),
    "empty but huge": ({"x": entry(shape=[0, *[1 << 40] * 3], offsets=[0, 0])}, "impossible shape"),
    "rank 17": ({"x": entry(shape=[1] * 17, offsets=[0, 1])}, "impossible shape"),
    "shape is no list": ({"x": entry(shape="4")}, "impossible shape"),
    "one offset": ({"x": entry(offsets=[0])}, "impossible offsets"),
    "negative offset": ({"x": entry(offsets=[-4, 0])}, "impossible offsets"),
    "swapped offsets": ({"x": entry(offsets=[4, 0])}, "its data range holds -4"),
    "range too short": ({"x": entry(offsets=[0, 3])}, "its data range holds 3"),
    "half a byte": ({"x": entry("F4", [3], [0, 2])}, "its data range holds 2"),
    "hole": ({"x": entry(), "y": entry(offsets=[5, 9])}, "follows a hole"),
    "hole at the start": ({"x": entry(offsets=[1, 5])}, "follows a hole"),
    "overlap": ({"x": entry(), "y": entry(offsets=[2, 6])}, "overlaps"),
    "same bytes": ({"x": entry(), "y": entry()}, "overlaps"),
    "beyond the end": ({"x": entry(shape=[999], offsets=[0, 999])}, "is truncated"),
    "surplus": ({"x": entry(shape=[2], offsets=[0, 2])}, "bytes that belong to no tensor"),
    "metadata": ({"__metadata__": {"a": 1}, "x": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_header(tmp_path: Path, case: str) -> None:
    header, expected = HEADERS[case]
    path = write(tmp_path / "model.safetensors", header, bytes(9))
    with pytest.raises(WeightFormatError) as caught:
        opened(path)
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    with pytest.raises(Exception):  # noqa: B017, PT011  the reference package refuses it as well
        safetensors.numpy.load_file(path)


def test_header_length_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in (MAX_HEADER_BYTES + 1, (1 << 64) - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(WeightFormatError, match="at most"):
            opened(path)


def test_valid_dtype_without_a_place_here(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"x": entry("U16", [2])}, bytes(4))
    source = open_weights(path)
    with pytest.raises(WeightFormatError, match="stored as U16"):
        source.part("x")
    source.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
sizes = st.integers(-2, 12) | st.sampled_from([1 << 31, 1 << 40, 1 << 63, 1 << 64]) | json_values
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F4", "X"]) | json_values,
        "shape": st.lists(sizes, max_size=4) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), st.binary())
def test_any_header_is_refused_or_read_in_bounds(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes
) -> None:
    check_any(write(tmp_path_factory.getbasetemp() / "any.safetensors", header, data))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_flipped_bytes(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    tensors = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype="u1")}
    whole = bytearray(safetensors.numpy.save(tensors))
    for position, value in flips:
        whole[position % len(whole)] = value
    path.write_bytes(whole)
    check_any(path)


def check_any(path: Path) -> None:
    """Refused with our own error, or every tensor has the size that its shape asks for; whatever
    is read here, the reference package reads too."""
    try:
        file = SafetensorsFile(path)
    except VllmxError:
        return
    safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    for name in file.entries:
        try:
            tensor = file.tensor(name)
        except WeightFormatError:
            continue
        assert tensor.view().shape == tensor.shape
    file.close()


# --- folders ------------------------------------------------------------------------------------


def save_shards(folder: Path) -> dict[str, Any]:
    """Two shards, their index and config.json; returns the tensors."""
    tensors = {f"t{i}": RNG.normal(size=(3, i + 1)).astype(np.float32) for i in range(4)}
    weight_map: dict[str, str] = {}
    for number, names in enumerate((("t0", "t1"), ("t2", "t3")), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index))


def test_shards(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.weights.part(name).dequantize(), value)
    checkpoint.weights.close()


def test_missing_tensor_names_the_nearest(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    with pytest.raises(WeightFormatError, match=r"nearest: model\.layers\.0\.mlp\.up_proj\.weight"):
        source.part("model.layers.0.mlp.gate_proj.weight")
    source.close()


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightFormatError, match=r"model-00002.*is missing.*download"):
        open_weights(tmp_path)


def test_index_names_a_tensor_that_no_file_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who needs it is told where it should be; nobody else is bothered."""
    save_shards(tmp_path)
    edit_index(tmp_path, t9="model-00001-of-00002.safetensors")
    source = open_weights(tmp_path)
    assert set(source.names()) == {"t0", "t1", "t2", "t3"}
    assert "in the index and in no file, they are left out: 't9'" in caplog.text
    with pytest.raises(
        WeightFormatError, match=r"no tensor 't9' .*places it in model-00001.*lacks"
    ):
        source.part("t9")
    source.close()


def test_a_tensor_in_another_file_than_the_index_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = save_shards(tmp_path)
    edit_index(tmp_path, t0="model-00002-of-00002.safetensors")
    source = open_weights(tmp_path)
    np.testing.assert_array_equal(source.part("t0").dequantize(), tensors["t0"])
    assert "in another file than the index says, they are taken where they are: 't0'" in caplog.text
    source.close()


@pytest.mark.parametrize("listed", [1, 2])
def test_a_tensor_in_two_files_is_that_of_the_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listed: int
) -> None:
    tensors = save_shards(tmp_path)
    first = {"t0": tensors["t0"], "t1": tensors["t1"], "t2": np.full((3, 3), 7, np.float32)}
    safetensors.numpy.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    edit_index(tmp_path, t2=f"model-0000{listed}-of-00002.safetensors")
    source = open_weights(tmp_path)
    expected = first["t2"] if listed == 1 else tensors["t2"]
    np.testing.assert_array_equal(source.part("t2").dequantize(), expected)
    assert "in two files, the one of the index is taken: 't2'" in caplog.text
    source.close()


def test_a_tensor_in_two_files_that_the_index_does_not_name(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    first = {name: tensors[name] for name in ("t0", "t1", "t2")}
    safetensors.numpy.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["t2"]
    path.write_text(json.dumps(index))
    with pytest.raises(WeightFormatError, match="tensor 't2' is in both"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b.safetensors",
             "x.bin", 7, None, "\0.safetensors"],
)  # fmt: skip
def test_index_cannot_leave_the_folder(tmp_path: Path, name: Any) -> None:
    save_shards(tmp_path)
    edit_index(tmp_path, t0=name)
    with pytest.raises(WeightFormatError, match=r"not a .*file of the same folder"):
        open_weights(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "["])
def test_damaged_index(tmp_path: Path, index: str) -> None:
    save_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightFormatError, match="download"):
        open_weights(tmp_path)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, tmp_path / name)
    with pytest.raises(WeightFormatError, match="is in both"):
        open_weights(tmp_path)


def test_second_copies_of_the_weights_are_left_alone(tmp_path: Path) -> None:
    save_shards(tmp_path)
    for name in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        safetensors.numpy.save_file({"other": np.zeros(1, np.float32)}, tmp_path / name)
    source = open_weights(tmp_path)
    assert set(source.names()) == {"t0", "t1", "t2", "t3"}
    source.close()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    source = open_weights(tmp_path)
    assert set(source.names()) == {"t0", "t1", "t2", "t3"}
    source.close()


def test_single_file_belongs_to_its_folder(tmp_path: Path) -> None:
    save_shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "model-00001-of-00002.safetensors")
    assert checkpoint.path == tmp_path
    assert set(checkpoint.weights.names()) == {"t0", "t1"}
    checkpoint.weights.close()


@pytest.mark.parametrize(("given", "found"), [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")])
def test_dtype_of_a_config_without_one(tmp_path: Path, given: Any, found: str) -> None:
    save_shards(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(given))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["dtype"] == found
    checkpoint.weights.close()


def test_what_other_files_say_does_not_come_from_the_config(tmp_path: Path) -> None:
    ours = {"modules": 5, "score_tokens": "no", "text_settings": []}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | ours))
    safetensors.numpy.save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.weights.close()
    assert not ours.keys() & checkpoint.config.keys()


def test_folder_without_config(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="holds no"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "an object is needed"),
        (b"\xff", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "too deeply"),
        (b" " * (9 << 20), "larger than the 8 MiB"),
    ],
)
def test_damaged_config(tmp_path: Path, text: bytes, problem: str) -> None:
    save_shards(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(WeightFormatError, match=problem):
        open_checkpoint(tmp_path)


def test_a_small_index_takes_little_memory(tmp_path: Path) -> None:
    save_shards(tmp_path)
    tracemalloc.start()
    try:
        open_weights(tmp_path).close()
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
