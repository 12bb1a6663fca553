"""Experts through `vllmx quantize` and `--isq`: the same types, and answers near the original's."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import UnsupportedOpError, WeightFormatError
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_testing.model_suite import random_weights

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")

REGISTRY = load_registry()
CONFIG: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "float32", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "head_dim": 64, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
}  # fmt: skip


def write(
    folder: Path, config: dict[str, Any], leave_out: str = "", nan_token: int | None = None
) -> Path:
    """Random weights with the demo model's tokenizer."""
    folder.mkdir()
    source = random_weights(REGISTRY.model_for(config).load()(config))
    tensors = {
        # the stream begins with values of the size of what the layers add
        name: source.part(name).dequantize() * (20 if "embed_tokens" in name else 1)
        for name in source.names()
    }
    tensors.pop(leave_out, None)
    if nan_token is not None:
        tensors["model.embed_tokens.weight"][nan_token] = np.nan
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("experts") / "model", CONFIG)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Granite with experts, whose files have those of a layer as one tensor."""
    config = CONFIG | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "attention_multiplier": 0.125,
    }
    return write(tmp_path_factory.mktemp("stacked") / "model", config)


@pytest.fixture(scope="module")
def file(original: Path) -> Path:
    path = original.parent / "q4_k_m.gguf"
    quantize(REGISTRY, original, path, "q4_k_m", threads=2)
    return path


LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": None,
}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "sliding_window": 32,
    },
    "glm4_moe": SHARED | {
        "architectures": ["Glm4MoeForCausalLM"], "n_group": 1, "topk_group": 1,
        "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": SHARED | LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "n_group": 2, "topk_group": 1,
    },
    "gemma4_text": {
        "architectures": ["Gemma4ForCausalLM"], "global_head_dim": 64, "sliding_window": 32,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
        "top_k_experts": 2,
    },
}  # fmt: skip
"""By model_type."""


def other(folder: Path, name: str) -> Path:
    left_out = ("num_experts", "norm_topk_prob") if name != "gemma4_text" else ()
    config = CONFIG | {"model_type": name} | OTHERS[name]
    return write(folder, {key: value for key, value in config.items() if key not in left_out})


def logprobs(model: Path, **options: Any) -> Any:
    """The log-probabilities of the 20 likeliest ids after a prompt, by id."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kv_blocks": 16}
    with LLM(str(model), dtype="float32", **limits, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 77, 1234, 9, 2000]}], params)
    assert output.outputs[0].logprobs is not None
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def test_types_in_the_file(file: Path) -> None:
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert kinds["blk.1.ffn_down_exps.weight"] == "Q6_K"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert Counter(".ffn_" in name for name in kinds)[True] == 2 * 5


@pytest.mark.parametrize("backend", ["cpu", "metal", "torch"])
def test_a_file_and_in_situ_answer_alike(original: Path, file: Path, backend: str) -> None:
    try:
        found = logprobs(file, backend=backend)
    except UnsupportedOpError as error:
        pytest.skip(error.message)
    assert found == logprobs(original, backend=backend, isq="q4_k")
    exact = logprobs(original, backend=backend)
    shared = sorted(set(found) & set(exact))
    assert found != exact
    assert len(shared) >= 10
    assert max(abs(found[token] - exact[token]) for token in shared) < 0.5


@pytest.mark.parametrize(("isq", "distance"), [("q8_0", 0.05), ("int8", 0.05), ("q4_k", 0.5)])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_experts_in_one_tensor_are_quantised_in_situ(
    stacked: Path, backend: str, isq: str, distance: float
) -> None:
    exact, found = logprobs(stacked, backend=backend), logprobs(stacked, backend=backend, isq=isq)
    shared = sorted(set(found) & set(exact))
    assert found != exact
    assert len(shared) >= 10
    assert max(abs(found[token] - exact[token]) for token in shared) < distance


def distance(found: dict[int, float], exact: dict[int, float]) -> float:
    """The distance between the log-probabilities of ids that are likely in both, which most are."""
    shared = found.keys() & exact.keys()
    assert len(shared) >= 10
    return max(abs(found[token] - exact[token]) for token in shared)


@pytest.mark.parametrize(
    ("name", "most"),
    [("glm4_moe", 0.06), ("deepseek_v3", 0.06), ("gemma4_text", 0.6)],  # the last's logits are wide
)
def test_other_architectures_in_situ_and_out_of_a_file(
    tmp_path: Path, name: str, most: float
) -> None:
    backend = "cpu"
    model, file = other(tmp_path / "m", name), tmp_path / "m.gguf"
    exact, found = (logprobs(model, backend=backend, isq=isq) for isq in (None, "q8_0"))
    assert 0 < distance(found, exact) < most
    for mix, reach in (("q8_0", most), ("f32", 1e-4)):
        quantize(REGISTRY, model, file, mix, threads=1)
        assert distance(logprobs(file, backend=backend), exact) < reach


def test_experts_with_input_features_first(tmp_path: Path) -> None:
    """In situ and in a file they are turned round."""
    model, file = other(tmp_path / "m", "gpt_oss"), tmp_path / "m.gguf"
    exact = logprobs(model, backend="torch")
    for isq, reach in (("q8_0", 0.06), ("int8", 0.06), ("q4_k", 1.0)):
        assert distance(logprobs(model, backend="torch", isq=isq), exact) < reach
    for mix, reach in (("f32", 1e-4), ("q8_0", 0.06), ("mxfp4_moe", 1.0)):
        quantize(REGISTRY, model, file, mix, threads=1)
        assert distance(logprobs(file, backend="torch"), exact) < reach


def test_a_file_of_the_file_is_as_exact(original: Path, tmp_path: Path) -> None:
    """Experts come out of one stack and go into another."""
    first, second = tmp_path / "bf16.gguf", tmp_path / "again.gguf"
    quantize(REGISTRY, original, first, "f32", threads=2)
    quantize(REGISTRY, first, second, "f32", threads=2)
    for path in (first, second):
        checkpoint, source = open_checkpoint(REGISTRY, path), open_checkpoint(REGISTRY, original)
        assert set(checkpoint.weights.names()) == set(source.weights.names())
        for name in source.weights.names():
            ours, theirs = (c.weights.part(name).dequantize() for c in (checkpoint, source))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        checkpoint.weights.close()
        source.weights.close()


@pytest.fixture
def without_one(tmp_path: Path) -> Path:
    return write(tmp_path / "m", CONFIG, "model.layers.1.mlp.experts.3.up_proj.weight")


def test_a_missing_expert_is_named(without_one: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightFormatError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        quantize(REGISTRY, without_one, tmp_path / "m.gguf", "q8_0", threads=1)
    with pytest.raises(WeightFormatError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        LLM(str(without_one), backend="torch", num_kv_blocks=16, max_num_seqs=2)
