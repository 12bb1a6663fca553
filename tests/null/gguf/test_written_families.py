"""Families with experts and latents written to GGUF files: the weights of the checkpoint, whatever
form it has them in, under the names and keys that llama.cpp gives them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.map import assemble
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.quantize.convert import Summary, quantize
from vllmx_models.formats.gguf.quantize.readback import plain
from vllmx_models.trunks.decoder import Decoder
from vllmx_testing.model_suite import random_weights

REGISTRY = load_registry()
LAYERS = 3
SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 1e4, "torch_dtype": "float32",
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 1,
}
del LATENT["head_dim"]
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
OSS = SMALL | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "sliding_window": 16,
}
INDEX = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
GEMMA4 = SMALL | {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "global_head_dim": 32,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 4096,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
}
MIXED = GEMMA4 | {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "final_logit_softcapping": 30.0,
}
ARCHS = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
KNOWN_AS = {"deepseek32": "glm-dsa"}
"""Architectures that the package does not know, with the same tensors as one that it does."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", OSS),
    "glm4-moe": ("glm4moe", SMALL | {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 2,
        "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1, "first_k_dense_replace": 2,
    }),
    "mimo-v2-flash": ("mimo2", SMALL | {
        "architectures": ["MiMoV2FlashForCausalLM"], "n_routed_experts": 4, "head_dim": 32,
        "v_head_dim": 16, "sliding_window": 24, "partial_rotary_factor": 0.5,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 2, "swa_num_key_value_heads": 4,
    }),
    "dots1": ("dots1", SMALL | {
        "architectures": ["Dots1ForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
    }),
    "ernie4.5-moe": ("ernie4_5-moe", SMALL | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 4, "moe_k": 2,
    }),
    "k-exaone": ("exaone-moe", SMALL | {
        "architectures": ["ExaoneMoeForCausalLM"], "num_experts": 4, "num_shared_experts": 2,
        "sliding_window": 16, "num_hidden_layers": 4,
    }),
    "hunyuan": ("hunyuan-dense", SMALL | {"architectures": ["HunYuanDenseV1ForCausalLM"]}),
    "hunyuan-moe": ("hunyuan-moe", SMALL | {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2,
        "moe_intermediate_size": 64,
    }),
    "ling-2": ("bailingmoe2", SMALL | {
        "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 4, "num_shared_experts": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    }),
    "llama4": ("llama4", SMALL | {
        "architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "num_hidden_layers": 4,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    }),
    "olmoe-clipped": ("olmoe", SMALL | {
        "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "clip_qkv": 8.0,
        "intermediate_size": 32,
    }),
    "phi-moe": ("phimoe", SMALL | {
        "architectures": ["PhiMoEForCausalLM"], "num_local_experts": 4, "attention_bias": True,
        "lm_head_bias": True, "moe_intermediate_size": 64, "rms_norm_eps": 1e-6,
    }),
    "deepseek-v2": ("deepseek2", LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "rope_scaling": YARN,
        "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
    }),
    "deepseek-v3": ("deepseek2", LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "n_group": 2, "topk_group": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    }),
    "mistral4": ("mistral4", LATENT | {
        "architectures": ["Mistral4ForCausalLM"], "norm_topk_prob": True,
        "rope_parameters": YARN | {
            "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    }),
    "glm-4.7-flash": ("deepseek2", LATENT | {"architectures": ["Glm4MoeLiteForCausalLM"]}),
    "deepseek-v3.2": ("deepseek32", LATENT | INDEX | {
        "architectures": ["DeepseekV32ForCausalLM"], "n_group": 2, "topk_group": 1,
    }),
    "glm-5": ("glm-dsa", LATENT | INDEX | {"architectures": ["GlmMoeDsaForCausalLM"]}),
    "glm-5.2": ("glm-dsa", LATENT | INDEX | {
        "architectures": ["GlmMoeDsaForCausalLM"], "index_topk_freq": 2,
    }),
    "granite-moe": ("granitemoe", SMALL | {
        "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 6.0,
    }),
    "gemma4-shared": ("gemma4", GEMMA4 | {"architectures": ["Gemma4ForCausalLM"]}),
    "gemma4-experts": ("gemma4", MIXED | {"architectures": ["Gemma4ForCausalLM"]}),
    "qwen3-vl": ("qwen3vl", {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    }),
    "qwen3-vl-moe": ("qwen3vlmoe", {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": SMALL | {"num_experts": 4, "rope_theta": 1e4},
    }),
    "qwen2.5-vl": ("qwen2vl", {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
    }),
    "gemma4-inside-images": ("gemma4", {
        "architectures": ["Gemma4ForConditionalGeneration"], "text_config": MIXED,
    }),
}  # fmt: skip


def saved(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def tensors_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Random ones, and some that are passed over: of a tower, of a layer of prediction."""
    model = REGISTRY.model_for(config).load()(config)
    source = random_weights(model)
    tensors = {name: source.part(name).dequantize() for name in source.names()}
    if "text_config" in config:
        tower = np.ones((2, 2), np.float32)
        name = "visual" if config["architectures"][0].startswith("Qwen") else "vision_tower"
        prefix = "model." if name == "visual" else ""
        return tensors | {f"{prefix}{name}.patch_embed.weight": tower}
    if "num_nextn_predict_layers" in config:
        return tensors | {f"model.layers.{LAYERS}.eh_proj.weight": np.ones((2, 2), np.float32)}
    return tensors


def written(folder: Path, path: Path, mix: str) -> Summary:
    return quantize(REGISTRY, folder, path, mix, threads=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints; some have tensors that the weight map does not ask for."""
    top = tmp_path_factory.mktemp("families")
    return {
        name: saved(top / name, config, tensors_of(config)) for name, (_, config) in CASES.items()
    }


def weights_of(path: Path) -> tuple[Decoder, dict[str, Any]]:
    """A model, and its logical weights."""
    checkpoint = open_checkpoint(REGISTRY, path)
    try:
        model = build_model(REGISTRY, checkpoint)
        assert isinstance(model, Decoder)
        return model, {spec.name: assemble(spec, checkpoint.weights) for spec in model.weights()}
    finally:
        checkpoint.weights.close()


@pytest.mark.parametrize("name", CASES)
def test_a_lossless_file_is_the_model(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    written(folders[name], path, "f32")
    (ours, wanted), (theirs, found) = weights_of(folders[name]), weights_of(path)
    assert [plain(one) for one in theirs.spec.layers] == [plain(one) for one in ours.spec.layers]
    assert theirs.shape.caches == ours.shape.caches
    assert theirs.shape.max_model_len == ours.shape.max_model_len
    assert found.keys() == wanted.keys()
    for key, (values, bias) in wanted.items():
        np.testing.assert_array_equal(found[key][0], values, err_msg=key)
        assert (found[key][1] is None) == (bias is None), key
        if bias is not None:
            np.testing.assert_array_equal(found[key][1], bias, err_msg=key)
    for key, table in ours.constants(64).items():
        np.testing.assert_allclose(theirs.constants(64)[key], table, atol=1e-6)
    _check_names(path, CASES[name][0])


def _check_names(path: Path, arch: str) -> None:
    """Checks names against the tables of the `gguf` package."""
    file = GGUFFile(path)
    allowed = {
        gguf.TENSOR_NAMES[one].replace("{bid}", "#")
        for one in gguf.MODEL_TENSORS[ARCHS[KNOWN_AS.get(arch, arch)]]
    }
    for name in file.tensors:
        stem = re.sub(r"\.(weight|bias|scale)$", "", name)
        assert re.sub(r"^blk\.\d+", "blk.#", stem) in allowed, name
    keys = {key.replace("{arch}", arch) for key in _keys(gguf.Keys)}
    newer = ("attention.indexer.types", "attention.value_scale")  # than the package
    keys |= {f"{arch}.{key}" for key in newer}
    strange = [key for key in file.metadata if key.startswith(f"{arch}.") and key not in keys]
    assert strange == []
    file.close()


def _keys(group: type) -> Iterator[str]:
    for value in vars(group).values():
        if isinstance(value, type):
            yield from _keys(value)
        elif isinstance(value, str):
            yield value


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_written_again(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A file that is written out of a file is the same, tensors and metadata."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    written(folders[name], first, "q8_0")
    written(first, second, "f32")
    one, other = GGUFFile(first), GGUFFile(second)
    assert one.tensors.keys() == other.tensors.keys()
    assert one.metadata.keys() == other.metadata.keys()
    for key, value in one.metadata.items():
        if key not in ("general.file_type", "general.name"):
            assert (
                np.array_equal(list(other.metadata[key]), list(value))
                if isinstance(value, Sequence | np.ndarray)
                else other.metadata[key] == value
            ), key
    for name, info in one.tensors.items():
        dense = {"F32": "f4", "F16": "f2"}.get(info.kind.name)
        if dense is not None:
            values = one.data(name).view(dense).astype(np.float32)
        else:
            rows = one.data(name).reshape(-1, info.kind.num_bytes)
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.kind.name])
        np.testing.assert_array_equal(other.data(name).view("f4"), values.reshape(-1), err_msg=name)
    one.close()
    other.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss with the experts' matrices in MXFP4, as it was published."""
    tensors, random = tensors_of(OSS), np.random.default_rng(3)
    for name in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, cols, rows = tensors.pop(name).shape
        shape = (count, rows, cols // 32)
        tensors[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(118, 124, shape).astype(np.uint8)
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return saved(
        tmp_path_factory.mktemp("packed") / "m",
        OSS | {"quantization_config": quantisation},
        tensors,
    )


@pytest.mark.parametrize("mix", ["f32", "q4_k_m", "mxfp4_moe"])
def test_blocks_stay_as_they_are(packed: Path, tmp_path: Path, mix: str) -> None:
    path = tmp_path / "m.gguf"
    summary = written(packed, path, mix)
    assert summary.types["MXFP4"].tensors == 3 * SMALL["num_hidden_layers"]
    (_, wanted), (_, found) = weights_of(packed), weights_of(path)
    for key, (values, _) in wanted.items():
        if ".experts." in key:
            np.testing.assert_array_equal(found[key][0], values, err_msg=key)
    file = GGUFFile(path)
    blocks = file.data("blk.1.ffn_up_exps.weight").reshape(-1, 17)
    means = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).reshape(4, 64, 32)
    file.close()
    np.testing.assert_array_equal(means, wanted["layers.1.experts.gate_up"][0][:, 64:])


def test_blocks_are_requantised_to_fewer_bits(packed: Path, tmp_path: Path) -> None:
    """Rows of 32 have nothing narrower; without blocks, MXFP4 is made where it is asked for."""
    again, path = tmp_path / "again.gguf", tmp_path / "m.gguf"
    written(packed, path, "f16")
    assert written(path, again, "q2_k").types["MXFP4"].tensors == 9
    dense = saved(tmp_path / "dense", OSS, tensors_of(OSS))
    made = written(dense, again, "mxfp4_moe").types
    assert made["MXFP4"].tensors == 9
    assert 0.05 < made["MXFP4"].relative_error < 0.2


def test_a_block_that_is_no_number(packed: Path, tmp_path: Path) -> None:
    tensors = safetensors.numpy.load_file(packed / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3] = 255
    config = json.loads((packed / "config.json").read_text())
    folder = saved(tmp_path / "m", config, tensors)
    with pytest.raises(WeightFormatError, match=r"layers\.1\.mlp\.experts\.down_proj.*not finite"):
        written(folder, tmp_path / "m.gguf", "q8_0")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt-oss",
            {"swiglu_limit": 3.0},
            r"layers\[0\]\.feed_forward\.spec\.clamp = 3\.0 .* 7\.0",
        ),
        ("deepseek-v3", {"rope_interleave": False}, r"layers\[0\]\.mixer\.interleaved = False"),
        (
            "glm4-moe",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            r"layers\[1\]\.feed_forward = DenseMLP",
        ),
    ],
)
def test_what_a_file_cannot_state_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = CASES[name][1] | change
    folder = saved(tmp_path / "m", config, tensors_of(config))
    with pytest.raises(UnsupportedModelError, match=message):
        written(folder, tmp_path / "m.gguf", "f32")


def test_an_expert_that_is_missing(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = tensors_of(CASES["glm4-moe"][1])
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    folder = saved(tmp_path / "m", CASES["glm4-moe"][1], tensors)
    with pytest.raises(WeightFormatError, match=r"no tensor '.*experts\.3\.up_proj\.weight'"):
        written(folder, tmp_path / "m.gguf", "f32")
