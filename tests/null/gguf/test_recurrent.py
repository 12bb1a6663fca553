"""Qwen3.5 in GGUF files, written as llama.cpp's converter does it: value heads tiled, decays
already made, norms plus one but for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.weights.part import WeightSource
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan

HEADS, KEY_HEADS, KEY, VALUE = 6, 2, 8, 10
CONFIG: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS,
    "linear_key_head_dim": KEY, "linear_value_head_dim": VALUE,
}  # fmt: skip
MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
LINEAR = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def tiled(values: np.ndarray, size: int) -> np.ndarray:
    """Value heads of `size` rows each, from grouped by key head to tiled."""
    heads = values.reshape(KEY_HEADS, HEADS // KEY_HEADS, size, *values.shape[1:])
    return heads.swapaxes(0, 1).reshape(values.shape)


def converted(name: str, values: np.ndarray) -> np.ndarray:
    """A tensor of a delta net."""
    keys = 2 * KEY_HEADS * KEY
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values.reshape(len(values), -1)
        return np.concatenate([values[:keys], tiled(values[keys:], VALUE)])
    if name == "in_proj_z.weight":
        return tiled(values, VALUE)
    if name == "out_proj.weight":
        return tiled(values.T, VALUE).T
    if name == "A_log":
        return tiled(-np.exp(values), 1)
    return values if name == "norm.weight" else tiled(values, 1)


def written(path: Path, name: str, config: dict[str, Any], source: WeightSource) -> None:
    arch = gguf.MODEL_ARCH.QWEN35 if name == "qwen35" else gguf.MODEL_ARCH.QWEN35MOE
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name)
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for ours in sorted(source.names()):
        values = source.part(ours).dequantize()
        if ".linear_attn." in ours:
            layer, _, rest = ours.removeprefix("model.layers.").partition(".linear_attn.")
            tensors[f"blk.{layer}.{LINEAR[rest]}"] = converted(rest, values)
            continue
        if ".experts." in ours:
            before, _, rest = ours.partition(".experts.")
            stacks.setdefault(f"{before}.experts.{rest.partition('.')[2]}", []).append(values)
            continue
        values = values + 1 if ours.endswith("norm.weight") else values
        theirs = names.get_name(ours, try_suffixes=(".weight",))
        assert theirs is not None, ours
        tensors[theirs] = values[0] if theirs.endswith("ffn_gate_inp_shexp.weight") else values
    for ours, parts in stacks.items():
        theirs = names.get_name(ours, try_suffixes=(".weight",))
        assert theirs is not None, ours
        tensors[theirs] = np.stack(parts)
    _header(writer, config)
    for theirs, values in tensors.items():
        writer.add_tensor(theirs, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _header(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(KEY)
    writer.add_ssm_group_count(KEY_HEADS)
    writer.add_ssm_time_step_rank(HEADS)
    writer.add_ssm_inner_size(HEADS * VALUE)
    writer.add_full_attention_interval(4)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])


def logits(model: Model, source: WeightSource) -> F32:
    """The logits of a text in two chunks."""
    options = LoadOptions(dtype="f32", max_model_len=32, max_num_seqs=1, num_kv_blocks=2)
    loaded = ReferenceBackend().load(model, source, options)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    rows = [Row(text[:5], 0, [0], "all", 0), Row(text[5:], 5, [0], "all", 0)]
    return np.concatenate([loaded.logits(make_plan([row], 16)).astype(np.float32) for row in rows])


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_files_are_read_as_the_model_that_they_hold(
    tmp_path: Path, registry: Registry, name: str
) -> None:
    moe = name == "qwen35moe"
    architecture = "Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"
    config = {**CONFIG, **(MOE if moe else {}), "architectures": [architecture]}
    model = registry.model_for(config).load()(config)
    source = random_weights(model)
    written(tmp_path / "model.gguf", name, config, source)
    checkpoint = open_checkpoint(registry, tmp_path / "model.gguf")
    expected = logits(model, source)
    found = logits(build_model(registry, checkpoint), checkpoint.weights)
    checkpoint.weights.close()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
