"""Files of latent attention: the matrices of the heads in one tensor or cut, the model the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.model import heads_of
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import WeightSource
from vllmx_testing.model_suite import random_weights

gguf = pytest.importorskip("gguf")

HEADS, NOPE, VALUE, RANK, ROTARY = 4, 12, 10, 24, 8
SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "torch_dtype": "float32", "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "v2": SMALL
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "rope_scaling": YARN,
        "topk_method": "greedy",
    },
    "v3": SMALL
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    },
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def in_file(source: WeightSource, cut: bool) -> dict[str, Any]:
    """The tensors as llama.cpp's converter names, stacks and cuts them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, 3)
    found: dict[str, Any] = {}
    for key in source.names():
        values, layer = source.part(key).dequantize(), (*key.split("."), "")[2]
        if ".experts." in key:
            _, expert, role, _ = key.rsplit(".", 3)
            stack = f"blk.{layer}.ffn_{role.removesuffix('_proj')}_exps.weight"
            found.setdefault(stack, []).append((int(expert), values))
        elif cut and "kv_b_proj" in key:
            heads = values.reshape(HEADS, NOPE + VALUE, RANK)
            found[f"blk.{layer}.attn_k_b.weight"] = heads[:, :NOPE].swapaxes(1, 2).copy()
            found[f"blk.{layer}.attn_v_b.weight"] = heads[:, NOPE:].copy()
        elif "correction_bias" in key:
            found[f"blk.{layer}.exp_probs_b.bias"] = values
        else:
            new = names.get_name(key, try_suffixes=(".weight",))
            assert new is not None, key
            found[new] = values
    return {
        key: np.stack([one for _, one in sorted(values, key=lambda pair: int(pair[0]))])
        if isinstance(values, list)
        else values
        for key, values in found.items()
    }


def write(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], cut: bool, **more: Any
) -> Path:
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(3 + more.get("nextn_predict_layers", 0))
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(40)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1 if cut else HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(ROTARY)
    writer.add_kv_lora_rank(RANK)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(RANK + ROTARY if cut else NOPE + ROTARY)
    writer.add_value_length(RANK if cut else VALUE)
    if cut:
        writer.add_key_length_mla(NOPE + ROTARY)
        writer.add_value_length_mla(VALUE)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(8)
    writer.add_expert_used_count(3)
    writer.add_expert_feed_forward_length(16)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.5)
    if "n_group" in config:
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(4)
        writer.add_expert_group_used_count(2)
    if "rope_scaling" in config:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_yarn_log_mul(0.1 * 0.707)
    for key, value in more.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    for key, values in tensors.items():
        writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("cut", [False, True], ids=["one kv_b", "cut heads"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_of_a_file_is_that_of_the_original(
    registry: Registry, tmp_path: Path, name: str, cut: bool
) -> None:
    config = CONFIGS[name]
    original = registry.model_for(config).load()(config)
    source = random_weights(original)
    path = write(tmp_path / "m.gguf", config, in_file(source, cut), cut)
    checkpoint = open_checkpoint(registry, path)
    try:
        model: Any = build_model(registry, checkpoint)
        layers = [
            replace(layer, mixer=replace(layer.mixer, cut_heads=False))
            for layer in model.spec.layers
        ]
        assert replace(model.spec, layers=tuple(layers)) == original.spec
        for mine, theirs in zip(model.weights(), original.weights(), strict=True):
            assert mine.name == theirs.name
            found, wanted = assemble(mine, checkpoint.weights), assemble(theirs, source)
            np.testing.assert_array_equal(found[0], wanted[0], err_msg=mine.name)
    finally:
        checkpoint.weights.close()


@pytest.mark.parametrize("copies", [False, True])
def test_layers_of_prediction_draft(registry: Registry, tmp_path: Path, copies: bool) -> None:
    """With embedding and head of their own, or those of the model."""
    source = random_weights(registry.model_for(CONFIGS["v3"]).load()(CONFIGS["v3"]))
    tensors, random = in_file(source, True), np.random.default_rng(2)
    extra = {
        f"blk.3.{key.split('.', 2)[2]}": value + np.float32(1)
        for key, value in tensors.items()
        if key.startswith("blk.2.")
    }
    vocabulary = tensors["token_embd.weight"].shape
    shapes = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head_norm": (32,)}
    shapes |= {"embed_tokens": vocabulary, "shared_head_head": vocabulary} if copies else {}
    for name, shape in shapes.items():
        extra[f"blk.3.nextn.{name}.weight"] = random.random(shape, np.float32)
    path = write(tmp_path / "m.gguf", CONFIGS["v3"], tensors | extra, True, nextn_predict_layers=1)
    checkpoint = open_checkpoint(registry, path)
    model = build_model(registry, checkpoint)
    assert len(model.shape.caches) == 3
    heads = heads_of(model)
    assert heads is not None
    read = {one.name: assemble(one, checkpoint.weights)[0] for one in heads.weights()}
    module = "blk.3.nextn"
    wanted = {
        "embed": extra.get(f"{module}.embed_tokens.weight", tensors["token_embd.weight"]),
        "lm_head": extra.get(f"{module}.shared_head_head.weight", tensors["output.weight"]),
        "enorm": extra[f"{module}.enorm.weight"],
        "hnorm": extra[f"{module}.hnorm.weight"],
        "norm": extra[f"{module}.shared_head_norm.weight"],
        "fc.embedded": extra[f"{module}.eh_proj.weight"][:, :32],
        "fc.hidden": extra[f"{module}.eh_proj.weight"][:, 32:],
        "layers.0.attn_norm": extra["blk.3.attn_norm.weight"],
    }
    for name, values in wanted.items():
        np.testing.assert_array_equal(read[name], values, err_msg=name)
    checkpoint.weights.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_gating_func": 3}, WeightFormatError, "expert_gating_func = 3 is not known"),
        ({"attention.sliding_window": 64}, UnsupportedModelError, "sliding_window = 64 changes"),
        (
            {"expert_group_count": 4, "expert_group_used_count": 5},
            UnsupportedModelError,
            "topk_group = 5 must be at most",
        ),
    ],
)
def test_files_that_are_not_served(
    registry: Registry, tmp_path: Path, change: dict[str, int], error: Any, message: str
) -> None:
    config = {key: value for key, value in CONFIGS["v3"].items() if key != "n_group"}
    source = random_weights(registry.model_for(CONFIGS["v3"]).load()(CONFIGS["v3"]))
    path = write(tmp_path / "m.gguf", config, in_file(source, True), True, **change)
    with pytest.raises(error, match=message):
        build_model(registry, open_checkpoint(registry, path))
