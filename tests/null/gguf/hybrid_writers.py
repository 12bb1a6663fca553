"""Writers of GGUF files of hybrids, like llama.cpp's converter: numbers of heads for each layer,
decays already made, rows of queries and keys in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter

Arrays = dict[str, np.ndarray]
LAYERS, HEADS, KV = 4, 4, 2
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MAMBA = {"heads": 8, "size": 16, "groups": 2, "state": 12, "kernel": 4}


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def common(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)


def with_experts(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_expert_count(5)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def with_mamba(writer: GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(MAMBA["kernel"])
    writer.add_ssm_state_size(MAMBA["state"])
    writer.add_ssm_group_count(MAMBA["groups"])
    writer.add_ssm_inner_size(MAMBA["heads"] * MAMBA["size"])
    writer.add_ssm_time_step_rank(MAMBA["heads"])


def mamba(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """The original's tensor as a file has it."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", ".D")):
        values = values.reshape(-1, 1)
    if name.endswith("norm.weight") and ".layers." in name:
        values = values.reshape(MAMBA["groups"], -1)
    return name.replace("dt_bias", "dt_proj.bias"), values.squeeze() if "conv1d" in name else values


def paired(name: str, values: np.ndarray) -> np.ndarray:
    ends = {"q_proj.weight": HEADS, "k_proj.weight": KV}
    heads = next((count for end, count in ends.items() if name.endswith(end)), None)
    return values if heads is None else in_pairs(values, heads)


def qwen3_next(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Heads of values stay in groups; those of q, k and v are put side by side."""
    keys, key, value = 2, config["linear_key_head_dim"], config["linear_value_head_dim"]
    for name, values in arrays.items():
        if name.endswith("in_proj_qkvz.weight"):
            heads = values.reshape(keys, -1, values.shape[-1])
            q, k, v, z = np.split(heads, np.cumsum([key, key, 2 * value]), axis=1)
            layer = name.split(".")[2]
            yield (
                f"blk.{layer}.attn_qkv.weight",
                np.concatenate([part.reshape(-1, values.shape[-1]) for part in (q, k, v)]),
            )
            yield f"blk.{layer}.attn_gate.weight", z.reshape(-1, values.shape[-1])
        elif name.endswith("A_log"):
            yield name, -np.exp(values)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            yield name, values + 1
        elif name.endswith("shared_expert_gate.weight"):
            yield name, values[0]
        else:
            yield name.replace("dt_bias", "dt_proj.bias"), values.squeeze()


def qwen3_next_of_old(
    arrays: Arrays, config: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Older files have the matrix of q, k, v and z as the original has it."""
    kept = {n: a for n, a in arrays.items() if not n.endswith("in_proj_qkvz.weight")}
    yield from qwen3_next(kept, config)
    for name in arrays.keys() - kept.keys():
        yield f"blk.{name.split('.')[2]}.ssm_in.weight", arrays[name]


def lfm2(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in arrays.items():
        name = name.removeprefix("model.") if ".experts." in name else name
        yield name.replace("expert_bias", "expert_bias.bias"), values.squeeze()


def granite(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    dense = not config["num_local_experts"]
    for name, values in arrays.items():
        layer = "".join(name.split(".")[2:3])
        if name.endswith("input_linear.weight"):
            ends = ("exps",) if "block_sparse_moe" in name else () if dense else ("shexp",)
            gate, up = np.split(values, 2, axis=-2)
            yield ".".join(["blk", layer, "_".join(["ffn_gate", *ends]), "weight"]), gate
            yield ".".join(["blk", layer, "_".join(["ffn_up", *ends]), "weight"]), up
        elif dense and name.endswith("output_linear.weight"):
            yield f"blk.{layer}.ffn_down.weight", values
        elif ".mamba." in name:
            yield mamba(name, values)
        else:
            yield name, paired(name, values)


def nemotron(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    kinds = config["hybrid_override_pattern"]
    for name, values in arrays.items():
        if ".mixer." in name and kinds[int(name.split(".")[2])] == "M":
            yield mamba(name, values)
        elif ".mixer.experts." in name:
            yield name.replace("backbone", "model").replace("mixer.experts", "mlp.experts"), values
        else:
            yield name.replace("correction_bias", "correction.bias"), paired(name, values)


def mamba1(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in arrays.items():
        values = -np.exp(values) if name.endswith("A_log") else values
        name = name.replace("router.", "gate.") if ".feed_forward." in name else name
        yield name, values.squeeze() if "conv1d" in name else values


def falcon_h1(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The factors of the config are multiplied into the weights."""
    before, behind = config["attention_in_multiplier"], config["attention_out_multiplier"]
    gate, down = config["mlp_multipliers"]
    keys, inner = MAMBA["groups"] * MAMBA["state"], MAMBA["heads"] * MAMBA["size"]
    rows = np.repeat(config["ssm_multipliers"], (inner, inner, keys, keys, MAMBA["heads"]))
    factors = {
        "q_proj": before,
        "k_proj": before * config["key_multiplier"],
        "v_proj": before,
        "o_proj": behind,
        "gate_proj": gate,
        "down_proj": down,
        "in_proj": config["ssm_in_multiplier"] * rows[:, None],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    for name, values in arrays.items():
        scaled = values * factors.get(name.split(".")[-2], 1)
        yield mamba(name, scaled) if ".mamba." in name else (name, scaled)


def kimi_linear(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Latent attention has the matrices of each head, those of keys turned."""
    for name, values in arrays.items():
        if name.endswith("kv_b_proj.weight"):
            keys, value = config["qk_nope_head_dim"], config["v_head_dim"]
            heads = values.reshape(HEADS, keys + value, -1)
            yield name.replace("kv_b", "k_b"), heads[:, :keys].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), heads[:, keys:]
        elif name.endswith("A_log"):
            yield name, -np.exp(values)
        elif name.endswith("conv1d.weight"):
            yield name, values.reshape(1, len(values), 1, -1)
        else:
            name = name.replace("dt_bias", "dt_proj.bias")
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


@dataclass(frozen=True)
class Family:
    arch: MODEL_ARCH
    config: Mapping[str, Any]
    tensors: Callable[[Arrays, Mapping[str, Any]], Iterator[tuple[str, np.ndarray]]]
    header: Callable[[GGUFWriter, Mapping[str, Any]], None]


def qwen_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    with_experts(writer, config)
    writer.add_head_count_kv(KV)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(8)
    writer.add_expert_shared_feed_forward_length(32)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(4)
    writer.add_ssm_inner_size(4 * config["linear_value_head_dim"])
    writer.add_full_attention_interval(4)


def lfm_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    writer.add_feed_forward_length(96)
    writer.add_head_count_kv([KV * (kind != "conv") for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(3)
    if "num_experts" in config:
        with_experts(writer, config)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def granite_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    with_mamba(writer)
    writer.add_head_count_kv([0, KV, 0, KV])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_attention_scale(0.25)
    writer.add_embedding_scale(2.0)
    writer.add_residual_scale(0.5)
    writer.add_logit_scale(3.0)
    rotates = config["position_embedding_type"] == "rope"
    writer.add_rope_scaling_finetuned(rotates)
    if config["num_local_experts"]:
        writer.add_expert_count(5)
        writer.add_expert_used_count(2)


def nemotron_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    writer.add_layer_norm_eps(1e-5)  # beside that of RMS norms
    with_mamba(writer)
    pattern, moe = config["hybrid_override_pattern"], "E" in config["hybrid_override_pattern"]
    writer.add_head_count_kv([KV * (letter == "*") for letter in pattern])
    inner = 32 if moe else 96
    writer.add_feed_forward_length([inner * (letter in "E-") for letter in pattern])
    writer.add_key_length(16)
    writer.add_value_length(16)
    if moe:
        with_experts(writer, config)
        writer.add_expert_shared_feed_forward_length(32)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(2.5)
        writer.add_expert_group_count(1)
        writer.add_moe_latent_size(32)


def mamba1_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(128)
    writer.add_ssm_state_size(12)
    writer.add_ssm_time_step_rank(32)
    if config["architectures"] == ["JambaForCausalLM"]:
        writer.add_head_count(HEADS)
        writer.add_head_count_kv([0, KV, 0, 0])
        writer.add_feed_forward_length(96)
        writer.add_expert_count(5)
        writer.add_expert_used_count(2)
    else:
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        writer.add_ssm_dt_b_c_rms("Falcon" in config["architectures"][0])


def mamba2(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in arrays.items():
        yield mamba(name, values) if ".mixer." in name else (name, values)


def mamba2_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_layer_norm_rms_eps(1e-5)
    with_mamba(writer)


def falcon_h1_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    with_mamba(writer)
    writer.add_feed_forward_length(96)
    writer.add_head_count_kv(KV)
    writer.add_key_length(16)
    writer.add_value_length(16)


def kimi_linear_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    common(writer, config)
    with_experts(writer, config)
    writer.add_feed_forward_length(96)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(4)
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def in_blocks(name: str, values: np.ndarray, kind: GGMLQuantizationType) -> bool:
    """Whether the converter quantises such a tensor."""
    plain = (
        "conv1d", "conv.conv", "norm", "gate.weight", "router", ".D", "A_log", "x_proj", "dt_proj",
        "kv_b", ".k_b", ".v_b",  # turned, so its blocks would not be the original's
    )  # fmt: skip
    wide = values.ndim > 1 and values.shape[-1] % 32 == 0
    return kind != GGMLQuantizationType.F32 and wide and not any(one in name for one in plain)


def stacked(arrays: Arrays) -> Arrays:
    """The experts of a layer as one tensor."""
    found: Arrays = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in arrays.items():
        before, has, rest = name.partition(".experts.")
        if has and rest.split(".")[0].isdigit():
            stacks.setdefault(f"{before}.experts.{rest.partition('.')[2]}", []).append(values)
        else:
            found[name] = values
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def written(path: Path, family: Family, arrays: Arrays, kind: GGMLQuantizationType) -> None:
    names = gguf.get_tensor_name_map(family.arch, LAYERS)
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    family.header(writer, family.config)
    for ours, values in family.tensors(stacked(arrays), family.config):
        theirs = ours
        if not ours.startswith("blk."):
            theirs = names.get_name(ours, try_suffixes=(".weight", ".bias")) or ""
            assert theirs, ours
        data = np.ascontiguousarray(values, np.float32)
        if in_blocks(ours, data, kind):
            writer.add_tensor(theirs, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(arrays: Arrays, kind: GGMLQuantizationType) -> Arrays:
    """What the file's blocks hold."""
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        if in_blocks(name, values, kind)
        else values
        for name, values in arrays.items()
    }
