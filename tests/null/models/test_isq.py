"""In-situ quantisation: which matrix becomes what, and that it is what a quantised file holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from vllmx_core.errors import ConfigError, WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint, quantise_in_situ
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.part import DENSE, WeightSource
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_models.formats.gguf.quantize.mixes import MIXES
from vllmx_models.formats.gguf.quantize.vocabulary import StatedTokenizer
from vllmx_models.isq import ALIASES, ROWS_ALONE
from vllmx_models.plugin import IN_SITU
from vllmx_models.quantization.float8 import e4m3_codes, fp8_codes, fp8_part
from vllmx_models.quantization.int8 import int8_codes, int8_part

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 1100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
CONVERT = "vllmx_models.formats.gguf.quantize.convert"
BLOCKS = [name for name in IN_SITU if name not in ("int8", "fp8")]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def write_model(registry: Registry, folder: Path, changes: Mapping[str, Any]) -> Path:
    """A folder with random weights, as bfloat16, and without a tokenizer."""
    config = CONFIG | dict(changes)
    rng = np.random.default_rng(3)
    tensors = {}
    for spec in registry.model_for(config).load()(config).weights():
        for part in spec.parts:
            shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
            values = rng.standard_normal(shape) * 0.05 + (spec.kind == "vector")
            tensors[part.name] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(registry, tmp_path_factory.mktemp("isq") / "model", {})


def open_isq(registry: Registry, folder: Path, name: str) -> WeightSource:
    checkpoint = open_checkpoint(registry, folder)
    model = build_model(registry, checkpoint)
    return quantise_in_situ(registry, checkpoint, model, name).weights


def test_the_plugin_lists_what_there_is() -> None:
    files_alone = {"f32", "f16", "bf16", "mxfp4_moe"}
    assert set(IN_SITU) == (MIXES.keys() - files_alone) | ALIASES.keys() | {"int8", "fp8"}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_a_quantised_file(
    registry: Registry, folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types and bytes alike, for every matrix of every layer."""
    monkeypatch.setattr(f"{CONVERT}.tokenizer_metadata", no_tokenizer)
    path = tmp_path / "model.gguf"
    quantize(registry, folder, path, ALIASES.get(name, name), threads=2)
    expected = open_checkpoint(registry, path).weights
    found = open_isq(registry, folder, name.upper())
    assert set(found.names()) == set(expected.names())
    kinds = set()
    for tensor in found.names():
        ours, theirs = found.part(tensor), expected.part(tensor)
        assert (ours.shape, ours.layout) == (theirs.shape, theirs.layout), tensor
        if ours.layout != DENSE:
            kinds.add(ours.layout.options["type"])
            data = ours.stored().buffers["weight"].data
            np.testing.assert_array_equal(
                data, theirs.stored().buffers["weight"].data, err_msg=tensor
            )
        np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize(), err_msg=tensor)
    assert len(kinds) > 1 or name in ("q8_0", "q6_k")  # the head has more bits than the rest
    found.close()
    expected.close()


def no_tokenizer(*arguments: object) -> StatedTokenizer:
    return StatedTokenizer({})


@pytest.mark.parametrize("name", ["q4_k_m", "int8", "fp8"])
def test_rows_are_made_alone(registry: Registry, folder: Path, name: str) -> None:
    found = open_isq(registry, folder, name)
    for tensor in ("model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        part = found.part(tensor)
        whole = part.dequantize()
        assert tensor != "lm_head.weight" or len(whole) > ROWS_ALONE  # that one is made in pieces
        for begin, end in ((0, 1), (33, 200), (part.shape[0] - 5, part.shape[0])):
            np.testing.assert_array_equal(part.dequantize(begin, end), whole[begin:end])
            piece = part.rows(begin, end)
            assert piece.layout == part.layout
            np.testing.assert_array_equal(piece.dequantize(), whole[begin:end])
            for key, raw in part.stored().buffers.items():
                np.testing.assert_array_equal(
                    piece.buffers[key].view(), raw.rows(begin, end).view()
                )
    found.close()


@pytest.mark.parametrize(("name", "relative"), [("int8", 0.012), ("fp8", 0.04)])
def test_eight_bits_leave_table_and_head_alone(
    registry: Registry, folder: Path, name: str, relative: float
) -> None:
    original, found = open_checkpoint(registry, folder).weights, open_isq(registry, folder, name)
    for tensor in found.names():
        ours, theirs = found.part(tensor), original.part(tensor).dequantize()
        if "_proj" not in tensor:
            assert ours.layout == DENSE
            np.testing.assert_array_equal(ours.dequantize(), theirs)
            continue
        assert ours.layout.kind == name
        assert ours.layout.options["strategy"] == "channel"
        assert ours.stored().buffers["scale"].shape == (ours.shape[0], 1)
        error = np.sqrt(np.square(ours.dequantize() - theirs).mean() / np.square(theirs).mean())
        assert 0.001 < error < relative
    found.close()
    original.close()


def test_float8_codes_of_many_floats() -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate(
        (
            rng.standard_normal(200_000) * np.exp2(rng.integers(-14, 8, 200_000)),
            np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
            np.arange(-65536, 65536) / 1024,  # ties among them
            np.arange(-2048, 2048) / 2**16,
            [0.0, -0.0, 448, -448, 2**-10, 2**-11, 1e-30, -1e-45],
        )
    )
    values = np.clip(values[np.isfinite(values)], -448, 448).astype(np.float32)
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(e4m3_codes(values), expected)


@pytest.mark.parametrize(
    ("codes", "part"), [(int8_codes, int8_part), (fp8_codes, fp8_part)], ids=["int8", "fp8"]
)
def test_rows_keep_their_greatest_value(codes: Any, part: Any) -> None:
    values = np.random.default_rng(5).standard_normal((6, 77)).astype(np.float32)
    values[1] = 0
    values[2] *= 1e-42  # subnormal: no scale can be inverted
    values[3] *= 1e30
    numbers, scales = codes(values)
    stored = numbers.reshape(-1).view(np.uint8), scales.reshape(-1)
    found = part("w", values.shape, *stored).dequantize()
    assert np.isfinite(found).all()
    peak = np.abs(values).max(axis=1)
    usable = [0, 3, 4, 5]
    np.testing.assert_allclose(np.abs(found).max(axis=1)[usable], peak[usable], rtol=1e-6)
    assert not found[1].any()
    assert (np.abs(found - values).max(axis=1) <= peak / 16 + 1e-40).all()


def test_rows_that_no_block_fits_stay_as_they_are(registry: Registry, tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 172, "head_dim": 8}
    path = write_model(registry, tmp_path / "odd", changes)
    found = open_isq(registry, path, "q4_k_m")
    assert found.part("model.layers.0.mlp.down_proj.weight").layout == DENSE  # rows of 172
    assert found.part("model.layers.0.mlp.up_proj.weight").layout.options == {"type": "Q5_0"}
    assert found.part("lm_head.weight").layout.options == {"type": "Q8_0"}
    found.close()


def test_unknown_types_are_refused(registry: Registry, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'q9_k' is not known.*known: fp8, int8, q2_k") as caught:
        open_isq(registry, folder, "q9_k")
    assert caught.value.param == "isq"


def test_quantised_checkpoints_are_refused(
    registry: Registry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{CONVERT}.tokenizer_metadata", no_tokenizer)
    path = tmp_path / "model.gguf"
    quantize(registry, folder, path, "q8_0", threads=2)
    with pytest.raises(ConfigError, match=r"is stored as gguf with 8.5 bits already"):
        open_isq(registry, path, "q4_k")
    quantize(registry, folder, tmp_path / "dense.gguf", "bf16", threads=2)
    source = open_isq(registry, tmp_path / "dense.gguf", "q4_k")
    original = open_isq(registry, folder, "q4_k")
    for tensor in original.names():
        np.testing.assert_array_equal(
            source.part(tensor).dequantize(), original.part(tensor).dequantize(), err_msg=tensor
        )


def test_values_that_are_not_finite_are_named(registry: Registry, tmp_path: Path) -> None:
    path = write_model(registry, tmp_path / "model", {"num_hidden_layers": 1}) / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name][7, 9] = np.inf
    safetensors.numpy.save_file(tensors, path)
    for isq in ("q4_k_m", "int8", "fp8"):
        part = open_isq(registry, path.parent, isq).part(name)
        part.dequantize(8, 60)
        with pytest.raises(WeightFormatError, match=r"k_proj.weight' has a value .* not finite"):
            part.dequantize()
