"""Files with experts: one tensor for those of a layer, cut into the weights of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_testing.model_suite import random_weights

gguf = pytest.importorskip("gguf")

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "torch_dtype": "float32",
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3moe": SMALL | EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "norm_topk_prob": True,
    },
    "qwen2moe": SMALL | EXPERTS | {
        "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 40,
    },
    "llama": SMALL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3},
    "gpt-oss": SMALL | {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "intermediate_size": 32,
        "head_dim": 16, "sliding_window": 16, "split_experts": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "olmoe": SMALL | {
        "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "intermediate_size": 32,
    },
    "granitemoe": SMALL | {
        "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4, "split_experts": True,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125,
        "logits_scaling": 8.0,
    },
    "minimax-m2": SMALL | {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "head_dim": 32,
        "intermediate_size": 32, "rotary_dim": 16,
    },
    "mimo2": SMALL | {
        "architectures": ["MiMoV2FlashForCausalLM"], "n_routed_experts": 4, "head_dim": 32,
        "v_head_dim": 16, "moe_intermediate_size": 32, "sliding_window": 24,
        "partial_rotary_factor": 0.5, "layer_types": ["full_attention", "sliding_attention"],
        "swa_num_key_value_heads": 4,
    },
    "glm4moe": SMALL | {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "head_dim": 32,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "use_qk_norm": True,
        "attention_bias": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
METADATA: dict[str, dict[str, Any]] = {
    "qwen2moe": {"expert_shared_feed_forward_length": 40},
    "gpt-oss": {
        "attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
    "granitemoe": {
        "embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.125,
        "logit_scale": 8.0,
    },
    "minimax-m2": {"expert_gating_func": 2, "rope.dimension_count": 16},
    "mimo2": {
        "expert_gating_func": 2, "rope.dimension_count": 16, "attention.sliding_window": 24,
        "attention.value_scale": 0.707, "rope.freq_base_swa": 1e4,
        "attention.sliding_window_pattern": [False, True], "attention.head_count_kv": [2, 4],
        "attention.value_length": 16,
    },
    "glm4moe": {
        "expert_gating_func": 2, "rope.dimension_count": 16, "expert_shared_count": 2,
        "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_group_count": 1, "expert_group_used_count": 1,
    },
}  # fmt: skip
"""What files say beside what all do."""
ROLES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def original(registry: Registry, name: str) -> dict[str, F32]:
    """Random tensors by the names of the original checkpoint."""
    source = random_weights(registry.model_for(CONFIGS[name]).load()(CONFIGS[name]))
    return {key: source.part(key).dequantize() for key in source.names()}


def in_file(name: str, tensors: Mapping[str, F32]) -> dict[str, Any]:
    """The tensors as llama.cpp's converter names and stacks them."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, 2)
    found: dict[str, Any] = {}
    for key, values in tensors.items():
        if ".experts." in key:
            module, expert, role, suffix = key.rsplit(".", 3)
            new = f"blk.{module.split('.')[2]}.ffn_{ROLES[role]}_exps.{suffix}"
            found.setdefault(new, {})[int(expert)] = values
            continue
        if name in ("llama", "granitemoe") and (".q_proj." in key or ".k_proj." in key):
            heads = 4 if ".q_proj." in key else 2
            halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        known = key.replace("e_score_correction_bias", "e_score_correction.bias")
        new = names.get_name(known, try_suffixes=(".weight", ".bias"))
        new = f"{new}.weight" if key.endswith(("sinks", "sink_bias")) else new
        assert new is not None, key
        found[new] = values.reshape(-1) if "ffn_gate_inp_shexp" in new else values
    return {
        key: np.stack([values[i] for i in range(len(values))])
        if isinstance(values, dict)
        else values
        for key, values in found.items()
    }


def write(path: Path, name: str, tensors: Mapping[str, F32], experts: int, layers: int = 2) -> Path:
    config = CONFIGS[name]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_key_length(config.get("head_dim", 16))
    own = {"attention.head_count_kv": 2, "attention.value_length": config.get("head_dim", 16)}
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(32)
    if name in ("gpt-oss", "olmoe", "minimax-m2"):
        writer.add_expert_feed_forward_length(32)
    for key, value in (own | METADATA.get(name, {})).items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(f"{name}.{key}", value)
    for key, values in tensors.items():
        writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def experts_of(name: str) -> int:
    config = CONFIGS[name]
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next(config[key] for key in keys if key in config))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_model_are_those_of_the_original(
    registry: Registry, tmp_path: Path, name: str, merged: bool
) -> None:
    tensors = original(registry, name)
    stored = in_file(name, tensors)
    if merged:
        for gate in [key for key in stored if ".ffn_gate_exps." in key]:
            halves = [stored.pop(key) for key in (gate, gate.replace("ffn_gate", "ffn_up"))]
            stored[gate.replace("ffn_gate", "ffn_gate_up")] = np.concatenate(halves, axis=1)
    path = write(tmp_path / "m.gguf", name, stored, experts_of(name))
    checkpoint = open_checkpoint(registry, path)
    try:
        assert set(checkpoint.weights.names()) == tensors.keys()
        for key, values in tensors.items():
            part = checkpoint.weights.part(key)
            assert part.shape == values.shape
            np.testing.assert_array_equal(part.dequantize(), values, err_msg=key)
        model = build_model(registry, checkpoint)
        wanted = registry.model_for(CONFIGS[name]).load()(CONFIGS[name])
        assert model.spec.layers == wanted.spec.layers  # type: ignore[attr-defined]
    finally:
        checkpoint.weights.close()


def test_fewer_experts_than_the_file_says(registry: Registry, tmp_path: Path) -> None:
    stored = in_file("qwen3moe", original(registry, "qwen3moe"))
    path = write(tmp_path / "m.gguf", "qwen3moe", stored, 78)
    checkpoint = open_checkpoint(registry, path)
    stack = next(s for s in build_model(registry, checkpoint).weights() if s.kind == "stack")
    with pytest.raises(WeightFormatError, match=r"'model\.layers\.0\.mlp\.experts\.77\.gate_proj"):
        checkpoint.weights.part(stack.matrices[77].parts[0].name)
    checkpoint.weights.close()


def test_tensors_that_are_no_stacks(registry: Registry, tmp_path: Path) -> None:
    stored = in_file("qwen3moe", original(registry, "qwen3moe"))
    key = "blk.0.ffn_gate_exps.weight"
    path = write(tmp_path / "flat.gguf", "qwen3moe", stored | {key: stored[key].reshape(-1)}, 5)
    with pytest.raises(WeightFormatError, match=r"'blk\.0\.ffn_gate_exps\.weight'.*cannot be cut"):
        open_checkpoint(registry, path)
    odd = stored | {"blk.1.ffn_gate_up_exps.weight": np.zeros((5, 33, 64), np.float32)}
    path = write(tmp_path / "odd.gguf", "qwen3moe", odd, 5)
    with pytest.raises(WeightFormatError, match="cannot be cut into pieces of 16, 16 rows"):
        open_checkpoint(registry, path)
    dense = CONFIGS["qwen3moe"] | {"architectures": ["Qwen3ForCausalLM"]}
    assert registry.model_for(dense).name == "qwen3"
    path = write(tmp_path / "qwen2.gguf", "qwen2moe", stored, 5)  # norms of heads are not qwen2's
    with pytest.raises(UnsupportedModelError, match="another variant"):
        open_checkpoint(registry, path)


def test_layers_of_multi_token_prediction_are_passed_over(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = in_file("glm4moe", original(registry, "glm4moe"))
    third = {key.replace("blk.1.", "blk.2."): v for key, v in stored.items() if "blk.1." in key}
    eh = {"blk.2.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    monkeypatch.setitem(METADATA["glm4moe"], "nextn_predict_layers", 1)
    path = write(tmp_path / "m.gguf", "glm4moe", stored | third | eh, 4, layers=3)
    checkpoint = open_checkpoint(registry, path)
    assert len(build_model(registry, checkpoint).shape.caches) == 2
    checkpoint.weights.close()
