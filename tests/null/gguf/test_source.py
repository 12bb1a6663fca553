"""GGUF files as checkpoints: names, shapes, orders of rows, config.json."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from vllmx_core.errors import (
    ModelNotFoundError,
    UnsupportedModelError,
    WeightFormatError,
)
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import DENSE, StoredPart
from vllmx_core.weights.tensor import RawTensor

from .models import TYPES, add_config, convert_tensors, of_type, write_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0},
    "qwen3-wide-heads": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4},
}


class Arrays:
    """A `WeightSource` of float32 arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def names(self) -> list[str]:
        return list(self.arrays)

    def part(self, name: str) -> Any:
        values = np.ascontiguousarray(self.arrays[name], np.float32)
        raw = RawTensor(name, "f32", values.shape, values.reshape(-1).view(np.uint8))
        return StoredPart(name, values.shape, DENSE, {"weight": raw})

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def original(registry: Registry, config: dict[str, Any]) -> Arrays:
    """Random weights under the names and in the shapes that the architecture asks for."""
    rng = np.random.default_rng(5)
    model = build_model(registry, Checkpoint(Path(), dict(config), Arrays({})))
    arrays: dict[str, np.ndarray] = {}
    for spec in model.weights():
        for part in spec.parts:
            shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
            arrays[part.name] = rng.normal(size=shape).astype(np.float32)
            if part.bias is not None:
                arrays[part.bias] = rng.normal(size=part.rows).astype(np.float32)
    return Arrays(arrays)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_and_config_come_back(registry: Registry, tmp_path: Path, name: str) -> None:
    config = BASE | VARIANTS[name]
    weights = original(registry, config)
    tensors = convert_tensors(config, weights)
    path = write_model(tmp_path / "model.gguf", config, tensors, of_type(TYPES.F32))
    opened = open_checkpoint(registry, path)
    assert opened.path == path
    assert {key: opened.config.get(key) for key in BASE} == {key: config[key] for key in BASE}
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        assert (opened.config.get(key) or None) == (config.get(key) or None)
    assert set(opened.weights.names()) == set(weights.names())
    for weight in weights.names():
        np.testing.assert_array_equal(
            opened.weights.part(weight).dequantize(), weights.arrays[weight], err_msg=weight
        )
    model, reference = (
        build_model(registry, checkpoint)
        for checkpoint in (opened, Checkpoint(path, dict(config), weights))
    )
    assert model.shape == reference.shape
    assert model.weights() == reference.weights()
    for table, values in reference.constants(64).items():
        np.testing.assert_array_equal(model.constants(64)[table], values)
    opened.weights.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "MXFP4"])
def test_rows_of_blocks_are_reordered_exactly(
    registry: Registry, tmp_path: Path, kind: str
) -> None:
    """Dequantised, then put in the original order, equals put in order, then quantised."""
    config = BASE | {"hidden_size": 64}
    weights = original(registry, config)
    tensors = convert_tensors(config, weights)
    path = write_model(tmp_path / "model.gguf", config, tensors, of_type(TYPES[kind]))
    opened = open_checkpoint(registry, path)
    for name in ("q_proj", "k_proj", "o_proj"):
        full = f"model.layers.1.self_attn.{name}.weight"
        part = opened.weights.part(full)
        expected = gguf.dequantize(
            gguf.quantize(weights.arrays[full], TYPES[kind]), TYPES[kind]
        ).reshape(part.shape)
        np.testing.assert_array_equal(part.dequantize(), expected)
        if part.layout.kind == "gguf":
            assert part.layout.options == {"type": kind}
            assert part.stored().buffers["weight"].dtype == "u8"
    opened.weights.close()


def test_whole_blocks_of_256_keep_their_bytes(registry: Registry, tmp_path: Path) -> None:
    """Types that the `gguf` package cannot write are written here as random blocks."""
    config = BASE | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    weights = original(registry, config)
    tensors = convert_tensors(config, weights)
    rng = np.random.default_rng(8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_config(writer, config)
    kinds = [TYPES[k] for k in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL")]
    raw: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if values.ndim == 1 or values.shape[1] % 256:
            writer.add_tensor(name, values)
            continue
        kind = kinds[len(raw) % len(kinds)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 64, (len(values), values.shape[1] // block * size), dtype=np.uint8)
        raw[name] = gguf.dequantize(blocks, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(raw) > 2 * len(kinds) - 1
    opened = open_checkpoint(registry, path)
    embedding = opened.weights.part("model.embed_tokens.weight")
    np.testing.assert_array_equal(embedding.dequantize(), raw["token_embd.weight"])
    q = opened.weights.part("model.layers.0.self_attn.q_proj.weight").dequantize()
    stored = raw["blk.0.attn_q.weight"]
    for head in range(4):
        for i in range(32):
            np.testing.assert_array_equal(q[head * 64 + i], stored[head * 64 + 2 * i])
            np.testing.assert_array_equal(q[head * 64 + 32 + i], stored[head * 64 + 2 * i + 1])
    part = opened.weights.part("model.layers.0.self_attn.q_proj.weight")
    for begin, end in ((0, 256), (0, 100), (70, 71), (97, 203)):
        np.testing.assert_array_equal(part.dequantize(begin, end), q[begin:end])
        piece = part.rows(begin, end)
        np.testing.assert_array_equal(piece.dequantize(), q[begin:end])
        found, whole = piece.buffers["weight"], part.stored().buffers["weight"]
        np.testing.assert_array_equal(found.view(), whole.view()[begin:end])
    assert opened.config["torch_dtype"] == "bfloat16"
    opened.weights.close()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fused_queries_keys_and_values(registry: Registry, tmp_path: Path, name: str) -> None:
    config = BASE | VARIANTS[name]
    weights = original(registry, config)
    tensors = convert_tensors(config, weights)
    for suffix in ("weight", "bias") if name == "qwen2" else ("weight",):
        parts = [tensors.pop(f"blk.1.attn_{part}.{suffix}") for part in "qkv"]
        tensors[f"blk.1.attn_qkv.{suffix}"] = np.concatenate(parts)
    path = write_model(tmp_path / "model.gguf", config, tensors, of_type(TYPES.F32))
    opened = open_checkpoint(registry, path)
    assert set(opened.weights.names()) == set(weights.names())
    for weight in weights.names():
        np.testing.assert_array_equal(
            opened.weights.part(weight).dequantize(), weights.arrays[weight], err_msg=weight
        )
    opened.weights.close()
    fused = tensors["blk.1.attn_qkv.weight"]
    tensors["blk.1.attn_qkv.weight"] = fused[:-1]
    path = write_model(tmp_path / "short.gguf", config, tensors, of_type(TYPES.F32))
    with pytest.raises(WeightFormatError, match=r"attn_qkv.* 4 \+ 2 \* 2 heads of 16"):
        open_checkpoint(registry, path)


def test_dense_parts_have_the_dtype_of_the_file(registry: Registry, tmp_path: Path) -> None:
    config = BASE | VARIANTS["qwen2"]
    tensors = convert_tensors(config, original(registry, config))
    path = write_model(tmp_path / "model.gguf", config, tensors, of_type(TYPES.F16))
    opened = open_checkpoint(registry, path)
    raw = opened.weights.part("model.layers.0.self_attn.q_proj.weight").stored().buffers["weight"]
    assert raw.dtype == "f16"
    assert opened.config["torch_dtype"] == "float16"
    opened.weights.close()


def test_shards_are_found_from_any_of_them(registry: Registry, tmp_path: Path) -> None:
    weights = original(registry, BASE)
    tensors = convert_tensors(BASE, weights)
    first = write_model(tmp_path / "model.gguf", BASE, tensors, of_type(TYPES.F32), split=6)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    assert first == shards[0]
    for path in (*shards, tmp_path):
        opened = open_checkpoint(registry, path)
        assert set(opened.weights.names()) == set(weights.names())
        assert opened.config["hidden_size"] == 64
        name = "model.layers.1.mlp.down_proj.weight"
        np.testing.assert_array_equal(opened.weights.part(name).dequantize(), weights.arrays[name])
        opened.weights.close()
    shards[1].rename(tmp_path / "elsewhere.bin")
    with pytest.raises(WeightFormatError, match=r"00002-of-.*is missing"):
        open_checkpoint(registry, shards[0])
    with pytest.raises(WeightFormatError, match=r"original\s+names"):
        open_checkpoint(registry, shards[0].rename(tmp_path / "renamed.gguf"))


def test_shards_of_two_models_are_refused(registry: Registry, tmp_path: Path) -> None:
    for folder, config in (("a", BASE), ("b", BASE | VARIANTS["llama-tied"])):
        (tmp_path / folder).mkdir()
        tensors = convert_tensors(config, original(registry, config))
        write_model(tmp_path / folder / "m.gguf", config, tensors, of_type(TYPES.F32), split=12)
    first = tmp_path / "a" / "m-00001-of-00002.gguf"
    other = max((tmp_path / "b").glob("*.gguf"))
    other.replace(tmp_path / "a" / "m-00002-of-00002.gguf")
    with pytest.raises(WeightFormatError, match="not of one model"):
        open_checkpoint(registry, first)


def test_a_folder_with_two_models_asks_for_one(registry: Registry, tmp_path: Path) -> None:
    tensors = convert_tensors(BASE, original(registry, BASE))
    for name in ("a", "mmproj-x"):
        write_model(tmp_path / f"{name}.gguf", BASE, tensors, of_type(TYPES.F32))
    open_checkpoint(registry, tmp_path).weights.close()
    write_model(tmp_path / "b.gguf", BASE, tensors, of_type(TYPES.F32))
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF models \('a.gguf', 'b.gguf'\)"):
        open_checkpoint(registry, tmp_path)


def test_unmapped_tensors_and_quirks_are_refused(registry: Registry, tmp_path: Path) -> None:
    tensors = convert_tensors(BASE, original(registry, BASE))
    sinks = tensors | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_model(tmp_path / "sinks.gguf", BASE, sinks, of_type(TYPES.F32))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight"):
        open_checkpoint(registry, path)
    path = write_model(
        tmp_path / "experts.gguf",
        BASE,
        tensors,
        of_type(TYPES.F32),
        extra=lambda writer: writer.add_expert_count(8),
    )
    with pytest.raises(WeightFormatError, match=r"llama\.expert_used_count = \(absent\) is needed"):
        open_checkpoint(registry, path)


def test_parts_of_models_are_refused(registry: Registry, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((48, 64), np.float32)}
    path = write_model(
        tmp_path / "adapter.gguf",
        BASE,
        tensors,
        of_type(TYPES.F32),
        extra=lambda writer: writer.add_type("adapter"),
    )
    with pytest.raises(UnsupportedModelError, match=r"is a LoRA adapter, .*llama-export-lora"):
        open_checkpoint(registry, path)
    path = write_model(
        tmp_path / "array.gguf",
        BASE,
        tensors,
        of_type(TYPES.F32),
        extra=lambda writer: writer.add_array("general.type", [1, 2]),
    )
    with pytest.raises(UnsupportedModelError, match=r"general.type array\(\[1, 2\]"):
        open_checkpoint(registry, path)
    vocabulary = write_model(tmp_path / "vocab.gguf", BASE, {}, of_type(TYPES.F32))
    with pytest.raises(WeightFormatError, match="vocabulary and no weights"):
        open_checkpoint(registry, vocabulary)


def test_types_without_a_reader_are_named(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = np.zeros((4, 66), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=TYPES.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightFormatError, match=r"blk\.0\.ffn_up\.weight.*IQ2_XXS"):
        open_checkpoint(registry, path)


def test_missing_tensors_name_their_neighbours(registry: Registry, tmp_path: Path) -> None:
    tensors = convert_tensors(BASE, original(registry, BASE))
    del tensors["blk.1.ffn_up.weight"]
    path = write_model(tmp_path / "model.gguf", BASE, tensors, of_type(TYPES.F32))
    opened = open_checkpoint(registry, path)
    model = build_model(registry, opened)
    wanted = next(spec for spec in model.weights() if spec.name == "layers.1.gate_up")
    with pytest.raises(WeightFormatError, match=r"layers\.1\.mlp\.up_proj.*nearest: .*up_proj"):
        assemble(wanted, opened.weights)
    opened.weights.close()


def test_an_unknown_architecture_lists_the_known(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*known: .*llama, .*qwen3"):
        open_checkpoint(registry, path)


def test_sampling_defaults_of_the_author(registry: Registry, tmp_path: Path) -> None:
    tensors = convert_tensors(BASE, original(registry, BASE))

    def sampling(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_model(tmp_path / "model.gguf", BASE, tensors, of_type(TYPES.F32), extra=sampling)
    opened = open_checkpoint(registry, path)
    assert opened.generation_config == {"temperature": 0.5, "top_k": 20}
    opened.weights.close()


PLUGIN = """
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import ModelSpec, WeightFormatSpec
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS, GGUFArchitecture, decoder_config


def config(header):
    return decoder_config(header, "logit_scale") | {"logits_scaling": header.number("logit_scale")}


GGUF = GGUFArchitecture(
    "MineForCausalLM",
    {**DECODER_TENSORS, "blk.{}.attn_sinks": "model.layers.{}.sinks"},
    config=config,
)


@hookimpl
def vllmx_models():
    return (
        ModelSpec(
            "mine", "builtins:dict", ("MineForCausalLM",), gguf_names=("llama",),
            gguf=__name__ + ":GGUF",
        ),
    )


@hookimpl
def vllmx_weight_formats():
    return (
        WeightFormatSpec(
            "gguf",
            "vllmx_models.formats.gguf.source:open_checkpoint",
            ("*.gguf",),
            needs_registry=True,
        ),
    )
"""


def test_a_plugin_brings_its_own_architecture(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllmx_gguf_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = Registry()
    own.add(importlib.import_module("vllmx_gguf_plugin"), "mine")
    tensors = convert_tensors(BASE, original(registry, BASE))
    sinks = np.arange(4, dtype=np.float32)
    path = write_model(
        tmp_path / "mine.gguf",
        BASE,
        tensors | {"blk.1.attn_sinks.weight": sinks},
        of_type(TYPES.F32),
        extra=lambda writer: writer.add_logit_scale(0.25),
    )
    opened = open_checkpoint(own, path)
    assert opened.config["architectures"] == ["MineForCausalLM"]
    assert opened.config["logits_scaling"] == 0.25
    np.testing.assert_array_equal(
        opened.weights.part("model.layers.1.sinks.weight").dequantize(), sinks
    )
    q = opened.weights.part("model.layers.0.self_attn.q_proj.weight").dequantize()
    np.testing.assert_array_equal(q, tensors["blk.0.attn_q.weight"])  # in the file's order
    opened.weights.close()
