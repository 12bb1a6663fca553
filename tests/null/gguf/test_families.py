"""Families beyond Llama's in GGUF files: written as llama.cpp's converter does it, with names from
the `gguf` package, and read back as the same model with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.map import assemble
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_models.trunks.decoder import Decoder
from vllmx_testing.model_suite import random_weights

from .models import interleave

ARCH = gguf.MODEL_ARCH
Write = Callable[[gguf.GGUFWriter], None]
Convert = Callable[[str, np.ndarray], np.ndarray]
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
LONG = [1.0, 2.0, 4.0, 8.0, 16.0, 20.0]
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]


@dataclass(frozen=True)
class Case:
    name: str
    architecture: str
    arch: int
    config: Mapping[str, Any]
    write: Write = lambda writer: None
    offset: float = 0.0
    """Of norms, as the converter adds it."""
    interleaved: bool = False
    epsilon: str = "rms"
    extra: Mapping[str, list[float]] = field(default_factory=dict)
    writes: bool = True
    """Whether vllmx writes the architecture under this name."""
    convert: Convert = lambda name, values: values
    """The converter's change of a tensor."""
    sizes: bool = True
    """Whether heads and widths are those of all layers; else `write` says them."""


def gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(11)


def gemma3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(11)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def olmo3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(11)
    writer.add_sliding_window_pattern([True, False])


def ministral3(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(16.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_beta_fast(32.0)
    writer.add_rope_scaling_yarn_beta_slow(1.0)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.5)


def phi3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(0)
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(4) / np.log(64))))


def granite(writer: gguf.GGUFWriter) -> None:
    writer.add_attention_scale(0.125)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.25)
    writer.add_logit_scale(8.0)


def cohere2(writer: gguf.GGUFWriter) -> None:
    writer.add_logit_scale(0.25)
    writer.add_sliding_window(11)
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def gemma4(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(11)
    writer.add_sliding_window_pattern([True, False] * 2)
    writer.add_key_length(20)
    writer.add_value_length(20)
    writer.add_key_length_swa(12)
    writer.add_value_length_swa(12)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)


def gemma3n(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(11)
    writer.add_sliding_window_pattern([True, False] * 2)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_head_count_kv(2)
    writer.add_key_length(12)
    writer.add_value_length(12)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(8)
    writer.add_feed_forward_length([72, 60, 72, 72])
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(4)
    writer.add_activation_sparsity_scale([1.6448536, 0.2533471, -math.inf, -math.inf])


def gemma4_shared(writer: gguf.GGUFWriter) -> None:
    gemma4(writer)
    writer.add_head_count_kv(2)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(8)
    writer.add_feed_forward_length([72, 72, 144, 144])


def gemma4_experts(writer: gguf.GGUFWriter) -> None:
    gemma4(writer)
    writer.add_head_count_kv([2, 1, 2, 1])
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_feed_forward_length(72)
    writer.add_expert_count(5)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(20)
    writer.add_final_logit_softcapping(30.0)


def conv1d(name: str, values: np.ndarray) -> np.ndarray:
    """GPT-2 has its matrices as (inputs, outputs)."""
    return values.T if ".c_" in name else values


def in_order(heads: int) -> Convert:
    """The rows of q, k and v of each key/value head, one kind below the other."""

    def convert(name: str, values: np.ndarray) -> np.ndarray:
        if "query_key_value" not in name:
            return values
        by_head = values.reshape(heads, -1, 12, *values.shape[1:])
        parts = (by_head[:, :-2], by_head[:, -2:-1], by_head[:, -1:])
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])

    return convert


def neox(writer: gguf.GGUFWriter) -> None:
    writer.add_parallel_residual(use=True)
    writer.add_rope_dimension_count(6)


GEMMA3N: dict[str, Any] = {
    "intermediate_size": [72, 60, 72, 72], "num_hidden_layers": 4, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 11,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61,
    "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0], "laurel_rank": 6, "rope_theta": 1e6,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "global_head_dim": 20,
    "sliding_window": 11,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
STILL = [1.0, 1.0, *[1e30] * 8]
GROWING = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
GELU = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
ROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
CASES = [
    Case("gemma", "GemmaForCausalLM", ARCH.GEMMA, GELU, offset=1.0),
    Case("gemma2", "Gemma2ForCausalLM", ARCH.GEMMA2,
         {**GELU, "query_pre_attn_scalar": 12, "sliding_window": 11}, gemma2, 1.0),
    Case("gemma2-27b", "Gemma2ForCausalLM", ARCH.GEMMA2,
         {**GELU, "query_pre_attn_scalar": 12, "head_dim": 16, "num_hidden_layers": 46,
          "sliding_window": 11}, gemma2, 1.0),
    Case("gemma3", "Gemma3ForCausalLM", ARCH.GEMMA3,
         {**GELU, "query_pre_attn_scalar": 12, "sliding_window": 11, "rope_theta": 1e6,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, gemma3, 1.0),
    Case("olmo2", "Olmo2ForCausalLM", ARCH.OLMO2, {}),
    Case("olmo3", "Olmo3ForCausalLM", ARCH.OLMO2,
         {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}, olmo3),
    Case("ministral3", "Ministral3ForCausalLM", ARCH.MISTRAL3,
         {"sliding_window": None, "rope_scaling": GROWING}, ministral3, interleaved=True),
    Case("mistral-small", "MistralForCausalLM", ARCH.MISTRAL3, {"sliding_window": None},
         interleaved=True, writes=False),
    Case("exaone4", "Exaone4ForCausalLM", ARCH.EXAONE4,
         {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}, olmo3),
    Case("exaone4-small", "Exaone4ForCausalLM", ARCH.EXAONE4, {"sliding_window": None}),
    Case("seed-oss", "SeedOssForCausalLM", ARCH.SEED_OSS, {"attention_out_bias": True}),
    Case("ernie4.5", "Ernie4_5ForCausalLM", ARCH.ERNIE4_5, {"use_bias": True}),
    Case("starcoder2", "Starcoder2ForCausalLM", ARCH.STARCODER2,
         {"sliding_window": 11, "tie_word_embeddings": True},
         lambda writer: writer.add_sliding_window(11), epsilon="layer"),
    Case("phi3", "Phi3ForCausalLM", ARCH.PHI3,
         {"original_max_position_embeddings": 64, "rope_scaling": ROPE}, phi3,
         extra={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}),
    Case("glm4", "Glm4ForCausalLM", ARCH.GLM4, {"partial_rotary_factor": 0.5},
         lambda writer: writer.add_rope_dimension_count(6)),
    Case("granite", "GraniteForCausalLM", ARCH.GRANITE,
         {"attention_multiplier": 0.125, "embedding_multiplier": 12.0,
          "residual_multiplier": 0.25, "logits_scaling": 8.0}, granite, interleaved=True),
    Case("command-r", "CohereForCausalLM", ARCH.COMMAND_R,
         {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True},
         lambda writer: writer.add_logit_scale(0.25), epsilon="layer"),
    Case("cohere2", "Cohere2ForCausalLM", ARCH.COHERE2,
         {"logit_scale": 0.25, "sliding_window": 11, "tie_word_embeddings": True}, cohere2,
         epsilon="layer"),
    Case("stablelm", "StableLmForCausalLM", ARCH.STABLELM,
         {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
         lambda writer: writer.add_rope_dimension_count(6), epsilon="layer"),
    Case("gemma3n", "Gemma3nForCausalLM", ARCH.GEMMA3N, GEMMA3N, gemma3n, sizes=False,
         writes=False),
    Case("gemma4-shared", "Gemma4ForCausalLM", ARCH.GEMMA4,
         {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
          "vocab_size_per_layer_input": 61, "use_double_wide_mlp": True}, gemma4_shared,
         extra={"rope_freqs.weight": STILL}, sizes=False),
    Case("gemma4-experts", "Gemma4ForCausalLM", ARCH.GEMMA4,
         {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
          "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 5,
          "top_k_experts": 2, "moe_intermediate_size": 20, "final_logit_softcapping": 30.0},
         gemma4_experts, extra={"rope_freqs.weight": STILL}, sizes=False),
    Case("stablelm-biases", "StableLmForCausalLM", ARCH.STABLELM,
         {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
         lambda writer: writer.add_rope_dimension_count(6), epsilon="layer"),
    Case("gpt2", "GPT2LMHeadModel", ARCH.GPT2,
         {"num_key_value_heads": 4, "tie_word_embeddings": True}, epsilon="layer", writes=False,
         convert=conv1d),
    Case("gptneox", "GPTNeoXForCausalLM", ARCH.GPTNEOX,
         {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}, neox, epsilon="layer",
         writes=False, convert=in_order(4)),
    Case("falcon-7b", "FalconForCausalLM", ARCH.FALCON, {"num_key_value_heads": 1},
         epsilon="layer", writes=False),
    Case("falcon-40b", "FalconForCausalLM", ARCH.FALCON, {"new_decoder_architecture": True},
         epsilon="layer", writes=False, convert=in_order(2)),
]  # fmt: skip


def built(config: Mapping[str, Any]) -> Decoder:
    model = load_registry().model_for(config).load()(config)
    assert isinstance(model, Decoder)
    return model


def named(case: Case, config: Mapping[str, Any], model: Decoder) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint as the converter writes them."""
    names = gguf.get_tensor_name_map(case.arch, config["num_hidden_layers"])
    source, found = random_weights(model), {}
    heads: dict[str, list[np.ndarray]] = {}
    for name in source.names():
        values = case.convert(name, source.part(name).dequantize())
        stem, _, number = name.removesuffix(".weight").partition(".norms.")
        if "projections." in name:  # the streams of Gemma 3n
            stem, _, number = name.removesuffix(".weight").rpartition(".")
        if number:
            heads.setdefault(stem, []).append(values)
            continue
        if case.interleaved and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, len(values) // config["head_dim"])
        if case.offset and name.endswith("norm.weight"):
            values = values + np.float32(case.offset)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("correct_output_scale"):
            new = f"{names.get_name(name)}.weight"
        if case.arch == ARCH.GEMMA4 and not name.endswith(".weight"):
            new = gemma4_name(names, name)
        assert new is not None, name
        found[new] = values
    for stem, stacked in heads.items():
        found[f"{names.get_name(stem)}.weight"] = np.stack(stacked)
    return found


def gemma4_name(names: Any, name: str) -> str:
    """The name in the file; the tables do not know those that are no weight by their name."""
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    return f"{names.get_name(name)}.weight"


def write(case: Case, config: Mapping[str, Any], model: Decoder, path: Path) -> None:
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    if case.sizes:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add = writer.add_layer_norm_rms_eps if case.epsilon == "rms" else writer.add_layer_norm_eps
    add(1e-5)
    case.write(writer)
    tensors = named(case, config, model)
    tensors |= {name: np.array(values, np.float32) for name, values in case.extra.items()}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_model_comes_back(case: Case, registry: Registry, tmp_path: Path) -> None:
    config = {**SMALL, **case.config, "architectures": [case.architecture]}
    model, source = built(config), random_weights(built(config))
    path = tmp_path / "model.gguf"
    write(case, config, model, path)
    checkpoint = open_checkpoint(registry, path)
    try:
        found = build_model(registry, checkpoint)
        assert isinstance(found, Decoder)
        assert _plain(found) == _plain(model)
        for name, table in model.constants(128).items():
            np.testing.assert_allclose(found.constants(128)[name], table, atol=1e-6)
        for ours, theirs in zip(model.weights(), found.weights(), strict=True):
            wanted, bias = assemble(ours, source)
            got, other = assemble(theirs, checkpoint.weights)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-7, err_msg=ours.name)
            assert (bias is None) == (other is None), ours.name
    finally:
        checkpoint.weights.close()


WRITTEN = [case for case in CASES if case.writes]


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
def test_quantize_states_what_it_read(case: Case, registry: Registry, tmp_path: Path) -> None:
    """Written by us in its turn: the same tensors, and a model that is the same."""
    config = {**SMALL, **case.config, "architectures": [case.architecture]}
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write(case, config, built(config), first)
    quantize(registry, first, second, "f32", threads=1)
    ours, theirs = (
        {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        for path in (second, first)
    )
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=2e-7, err_msg=name)
    checkpoint = open_checkpoint(registry, second)
    found = build_model(registry, checkpoint)
    checkpoint.weights.close()
    assert isinstance(found, Decoder)
    assert _plain(found) == _plain(built(config))


def _plain(model: Decoder) -> Any:
    """All but what is told in other words: tables, dtype."""
    layers = tuple(
        (
            replace(layer.mixer, rope=None, names=None),  # type: ignore[type-var]
            replace(layer.feed_forward, names=None)
            if isinstance(layer.feed_forward, DenseMLP)
            else layer.feed_forward,
            (layer.norms.named.keys(), layer.norms.parallel),
            layer.extra,
            layer.scalar,
        )
        for layer in model.spec.layers
    )
    return replace(model.spec, layers=layers, dtype="")
