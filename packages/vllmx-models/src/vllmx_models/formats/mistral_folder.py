"""Folders in Mistral's own form: params.json in place of config.json, consolidated*.safetensors
with names of their own, whose heads rotate neighbouring dimensions together."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.system.json_files import read_json_object
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource

from vllmx_models.config import ConfigReader

PARAMS_NAME = "params.json"
WEIGHTS = "consolidated*.safetensors"
_KEYS: Mapping[str, str] = {
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "vocab_size": "vocab_size",
}
_UNKNOWN = ("moe", "q_lora_rank", "quantization", "ragged_attention", "quant_config")
_POSITIONS = 32768
_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_THEIRS = {theirs: ours for ours, theirs in _NAMES.items()}
_OURS = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")


def read_params(folder: Path) -> dict[str, Any] | None:
    """params.json in the terms of config.json; None without the file. Raises UnsupportedModelError
    for what it has and is not read."""
    params = read_json_object(folder / PARAMS_NAME)
    if params is None:
        return None
    for key in _UNKNOWN:
        if params.get(key):
            raise UnsupportedModelError(
                f"{folder / PARAMS_NAME}: {key} is not read here: give the model's folder with"
                " config.json and model*.safetensors"
            )
    read = ConfigReader(params, "model with params.json")
    found = {ours: params[theirs] for theirs, ours in _KEYS.items() if params.get(theirs)}
    positions = next(
        (key for key in ("max_position_embeddings", "max_seq_len") if read.has(key)), ""
    )
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        **found,
        "rope_interleaved": True,
        "max_position_embeddings": read.integer(positions) if positions else _POSITIONS,
    }
    rope = _rope(read)
    if rope:
        config["rope_parameters"] = {"rope_theta": read.number("rope_theta"), **rope}
    if read.has("llama_4_scaling"):
        config["architectures"] = ["Ministral3ForCausalLM"]
    return config


def _rope(read: ConfigReader) -> dict[str, Any]:
    """YaRN, whose sums are not warmed unless `apply_scale` says so, and the growth of queries."""
    found: dict[str, Any] = {}
    if read.has("yarn"):
        yarn = read.part("yarn")
        found = {
            "rope_type": "yarn",
            "factor": yarn.number("factor"),
            "original_max_position_embeddings": yarn.integer("original_max_position_embeddings"),
            "beta_fast": yarn.number("beta", 32.0),
            "beta_slow": yarn.number("alpha", 1.0),
            **({} if yarn.flag("apply_scale", True) else {"attention_factor": 1.0}),
        }
    if read.has("llama_4_scaling"):
        grows = read.part("llama_4_scaling")
        length = grows.integer("original_max_position_embeddings")
        if found.get("original_max_position_embeddings", length) != length:
            raise read.error("llama_4_scaling", "has another context than yarn")
        found |= {
            "llama_4_scaling_beta": grows.number("beta"),
            "original_max_position_embeddings": length,
        }
    return found


class MistralNames(SourceOver):
    """A `WeightSource` over consolidated*.safetensors, by the names of transformers. Tensors of
    other parts, such as `vision_encoder`, are not among its names."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        found = ((_ours(name), name) for name in source.names())
        self._stored = {ours: name for ours, name in found if ours is not None}

    def names(self) -> Collection[str]:
        """All names of the text model."""
        return self._stored.keys()

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError, with the nearest names, when `name` is missing."""
        return self._source.part(self._stored.get(name, _theirs(name)))


def _ours(name: str) -> str | None:
    """transformers' name of a tensor; None: it is not the text model's."""
    layer = _LAYER.fullmatch(name)
    stem = layer[2] if layer else name.removesuffix(".weight")
    ours = _THEIRS.get(stem)
    if ours is None:
        return None
    return f"model.layers.{layer[1]}.{ours}.weight" if layer else f"{ours}.weight"


def _theirs(name: str) -> str:
    """The name in the files, for errors."""
    layer = _OURS.fullmatch(name)
    stem = layer[2] if layer else name.removesuffix(".weight")
    known = _NAMES.get(stem, stem)
    return f"layers.{layer[1]}.{known}.weight" if layer else f"{known}.weight"
