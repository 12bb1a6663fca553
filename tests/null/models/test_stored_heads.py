"""Tensors that a checkpoint stores and its config does not speak of: used, or named in the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from vllmx_core.errors import ModelNotFoundError, UnsupportedModelError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.map import assemble
from vllmx_engine.core.load import log_unread

REGISTRY = load_registry()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
GEMMA = {**CONFIG, "architectures": ["GemmaForCausalLM"], "head_dim": 8, "hidden_act": "gelu"}
del GEMMA["tie_word_embeddings"]  # it is tied unless the config says otherwise


def tensors(config: dict[str, object] = CONFIG) -> dict[str, np.ndarray]:
    """All that the tied model reads."""
    rng = np.random.default_rng(5)
    model = REGISTRY.model_for(config).load()(config)
    found = {}
    for spec in model.weights():
        for part in spec.parts:
            shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
            found[part.name] = rng.normal(size=shape).astype(np.float32)
    return found


def save(folder: Path, config: dict[str, object], weights: dict[str, np.ndarray]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def head_and_table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    checkpoint = open_checkpoint(REGISTRY, folder)
    try:
        specs = {spec.name: spec for spec in build_model(REGISTRY, checkpoint).weights()}
        return tuple(
            assemble(specs[name], checkpoint.weights)[0].copy() for name in ("lm_head", "embed")
        )
    finally:
        checkpoint.weights.close()


@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=["said", "by default"])
def test_a_stored_head_that_differs_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, object]
) -> None:
    weights = tensors(config)
    stored = weights["model.embed_tokens.weight"].copy()
    stored[39, 15] += 1  # the last value alone
    save(tmp_path, config, weights | {"lm_head.weight": stored})
    head, table = head_and_table(tmp_path)
    np.testing.assert_array_equal(head, stored)
    np.testing.assert_array_equal(table, weights["model.embed_tokens.weight"])
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text


def test_a_copy_of_the_embedding_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = tensors()
    table = weights["model.embed_tokens.weight"]
    save(tmp_path, CONFIG, weights | {"lm_head.weight": table.copy()})
    checkpoint = open_checkpoint(REGISTRY, tmp_path)
    specs = {spec.name: spec for spec in build_model(REGISTRY, checkpoint).weights()}
    checkpoint.weights.close()
    assert specs["lm_head"].parts == specs["embed"].parts
    assert not caplog.text


def test_a_head_of_another_shape_is_left_out_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tensors()
    save(tmp_path, CONFIG, weights | {"lm_head.weight": np.ones((39, 16), np.float32)})
    head, _ = head_and_table(tmp_path)
    np.testing.assert_array_equal(head, weights["model.embed_tokens.weight"])
    assert "lm_head.weight is left out, its shape [39, 16]" in caplog.text


def test_a_tied_model_may_have_its_matrix_by_the_name_of_the_head(tmp_path: Path) -> None:
    weights = tensors()
    table = weights.pop("model.embed_tokens.weight")
    save(tmp_path, CONFIG, weights | {"lm_head.weight": table})
    for found in head_and_table(tmp_path):
        np.testing.assert_array_equal(found, table)


def test_tensors_that_nobody_reads_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attention = "model.layers.0.self_attn"
    save(
        tmp_path,
        CONFIG,
        tensors()
        | {
            f"{attention}.q_proj.bias": np.ones(16, np.float32),
            f"{attention}.k_proj.bias": np.zeros(16, np.float32),  # as some quantisers add them
            f"{attention}.rotary_emb.inv_freq": np.ones(4, np.float32),
        },
    )
    checkpoint = open_checkpoint(REGISTRY, tmp_path)
    log_unread(build_model(REGISTRY, checkpoint), checkpoint)
    checkpoint.weights.close()
    warning, passed = caplog.records
    assert warning.levelname == "WARNING"
    assert warning.getMessage().endswith("does not read: 'model.layers.*.self_attn.q_proj.bias'")
    assert passed.levelname == "INFO"
    assert "inv_freq" in passed.getMessage()


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin", None])
def test_an_adapter_is_named_as_one(tmp_path: Path, weights: str | None) -> None:
    settings = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    if weights is not None:
        safetensors.numpy.save_file({"a": np.ones(1, np.float32)}, tmp_path / weights)
    paths = [tmp_path] if weights is None else [tmp_path, tmp_path / weights]
    for path in paths:
        with pytest.raises(
            UnsupportedModelError, match=r"is a LoRA adapter of 'Qwen/Qwen3-0.6B'.*merge_and_unload"
        ):
            open_checkpoint(REGISTRY, path)


def test_a_whole_model_with_an_adapter_in_its_folder_is_the_model(tmp_path: Path) -> None:
    save(tmp_path, CONFIG, tensors())
    (tmp_path / "adapter_config.json").write_text("{}")
    open_checkpoint(REGISTRY, tmp_path).weights.close()


def test_pickled_weights_are_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin .*save_pretrained"):
        open_checkpoint(REGISTRY, tmp_path)
