"""Writes GGUF files with the `gguf` package: the models and tokenizers of Hugging Face folders, the
way llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from vllmx_core.weights.part import WeightSource
from vllmx_models.formats.safetensors import open_checkpoint

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
}
TYPES = gguf.GGMLQuantizationType
Choose = Callable[[str, np.ndarray], TYPES]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the query and key rows: pairs instead of halves in each head."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def of_type(kind: TYPES) -> Choose:
    """Matrices as `kind` where their rows allow it, vectors as F32: what quantisers do."""

    def choose(name: str, values: np.ndarray) -> TYPES:
        block = gguf.GGML_QUANT_SIZES[kind][0]
        return kind if values.ndim > 1 and values.shape[-1] % block == 0 else TYPES.F32

    return choose


def convert_tensors(config: Mapping[str, Any], weights: WeightSource) -> dict[str, np.ndarray]:
    """All weights as float32 under GGUF's names."""
    arch = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {}
    for name in sorted(weights.names()):
        values = weights.part(name).dequantize()
        if arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3):
            if ".q_proj." in name:
                values = interleave(values, heads)
            if ".k_proj." in name:
                values = interleave(values, kv_heads)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        found[new_name] = values
    return found


def add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The hyperparameters that the converter writes for these architectures."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config["architectures"][0] in ("LlamaForCausalLM", "SmolLM3ForCausalLM"):
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window") and config["architectures"][0] == "MistralForCausalLM":
        writer.add_sliding_window(config["sliding_window"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """tokenizer.json and tokenizer_config.json of a folder; SentencePiece's are known by their byte
    tokens and get scores that make the merges come in the same order."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens, types = tokens_of(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]
    ]
    if model["model"]["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores_of(tokens, merges))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad", "unk"):
        token = config.get(f"{name}_token")
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    if "add_bos_token" in config:
        writer.add_add_bos_token(config["add_bos_token"])
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


def tokens_of(model: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens of a tokenizer.json in the order of their ids, and their types."""
    ids = dict(model["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in model["added_tokens"]})
    tokens = sorted(ids, key=ids.__getitem__)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for token in model["added_tokens"]:
        special = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        types[token["id"]] = special
    for index, token in enumerate(tokens):
        if model["model"]["byte_fallback"] and token.startswith("<0x") and len(token) == 6:
            types[index] = gguf.TokenType.BYTE
    return tokens, types


def scores_of(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """The rank of the first merge that makes a token, negated."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault(merge.replace(" ", ""), rank)
    return [-float(first.get(token, 1_000_000)) for token in tokens]


def write_model(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    choose: Choose,
    *,
    tokenizer: Path | None = None,
    pre: str = "smollm",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    split: int = 0,
) -> Path:
    """A whole file; with `split` a set of shards of so many tensors each, the first is returned."""
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["architectures"][0]]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    writer.add_name("test model")
    add_config(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, pre)
    if extra is not None:
        extra(writer)
    for name, values in tensors.items():
        kind = choose(name, values)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def convert_folder(
    folder: Path, path: Path, choose: Choose, without: str = "", **options: Any
) -> Path:
    """A Hugging Face folder, tokenizer included, as a GGUF file, `without` one tensor."""
    checkpoint = open_checkpoint(folder)
    try:
        tensors = convert_tensors(checkpoint.config, checkpoint.weights)
        tensors.pop(without, None)
        return write_model(path, checkpoint.config, tensors, choose, tokenizer=folder, **options)
    finally:
        checkpoint.weights.close()
