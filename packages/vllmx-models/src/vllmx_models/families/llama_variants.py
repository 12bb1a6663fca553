"""Models in Llama's layout with class names and defaults of their own: CWM, ERNIE 4.5, Helium,
InternLM and InternLM 3, MiMo, Seed-OSS, Yi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import num_layers, sliding_layers
from vllmx_models.families.llama import llama_decoder
from vllmx_models.families.qwen import qwen2
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS, GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder
from vllmx_models.trunks.heads import HeadNames

_CWM_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def seed_oss(config: Mapping[str, Any]) -> Decoder:
    """Biases on q, k and v unless the config says otherwise; heads of 128."""
    read = _reader(config, "SeedOssForCausalLM")
    return llama_decoder(
        read,
        head=128,
        kv_heads=8,
        positions=524288,
        biases=(
            read.flag("attention_bias", True),
            read.flag("attention_out_bias", False),
            read.flag("mlp_bias", False),
        ),
    )


def ernie4_5(config: Mapping[str, Any]) -> Decoder:
    """Neighbouring dimensions of a head are rotated together; `use_bias` is for all matrices."""
    read = _reader(config, "Ernie4_5ForCausalLM")
    biases = (read.flag("use_bias", False),) * 3
    return llama_decoder(
        read,
        head=128,
        kv_heads=2,
        positions=131072,
        theta=500_000.0,
        biases=biases,
        eps=1e-5,
        tied=True,
        interleaved=True,
    )


def helium(config: Mapping[str, Any]) -> Decoder:
    """Neighbouring dimensions of a head are rotated together."""
    read = _reader(config, "HeliumForCausalLM")
    biases = (read.flag("attention_bias", False), False, read.flag("mlp_bias", False))
    return llama_decoder(
        read, head=128, kv_heads=20, positions=4096, biases=biases, eps=1e-8, interleaved=True
    )


def cwm(config: Mapping[str, Any]) -> Decoder:
    """A window in three of four layers, the first of which has none."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _CWM_ROPE
    config = {**config, "rope_parameters": rope}
    read = _reader(config, "CwmForCausalLM", "layer_types", "sliding_window")
    sliding = sliding_layers(read, [layer % 4 != 0 for layer in range(num_layers(read))])
    return llama_decoder(
        read,
        head=128,
        kv_heads=8,
        positions=131072,
        theta=1_000_000.0,
        biases=(False, False, read.flag("mlp_bias", False)),
        eps=1e-5,
        sliding=sliding,
        window=read.integer("sliding_window", 8192, high=1 << 31) if any(sliding) else None,
    )


def internlm(config: Mapping[str, Any]) -> Decoder:
    """The first InternLM: `bias` is for the attention's matrices."""
    read = _reader(config, "InternLMForCausalLM")
    bias = read.flag("bias", True)
    return llama_decoder(read, positions=2048, biases=(bias, bias, False))


def internlm3(config: Mapping[str, Any]) -> Decoder:
    """`qkv_bias` and `bias` are what Llama calls `attention_bias` and `mlp_bias`."""
    read = _reader(config, "InternLM3ForCausalLM")
    qkv = read.flag("qkv_bias", read.flag("attention_bias", False))
    rest = read.flag("bias", read.flag("mlp_bias", False))
    return llama_decoder(
        read, head=128, kv_heads=2, positions=32768, biases=(qkv, rest, rest), eps=1e-5
    )


def mimo(config: Mapping[str, Any]) -> Decoder:
    """Qwen2's layers, and one that predicts one more token."""
    decoder = qwen2(config)
    heads = HeadNames(
        "model.mtp_layers",
        "model.mtp_layers.0",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        hidden_first=True,
    )
    return Decoder(replace(decoder.spec, prediction=heads))


def yi(config: Mapping[str, Any]) -> Decoder:
    """The first Yi, whose norms have names of their own."""
    read = _reader(config, "YiForCausalLM")
    return llama_decoder(read, positions=4096, norms=LayerNorms("ln1", None, "ln2"))


def _reader(config: Mapping[str, Any], architecture: str, *windows: str) -> ConfigReader:
    """Refuses what Llama does not have, biases and the keys of `windows` apart."""
    read = ConfigReader(config, architecture)
    read.refuse_quirks("attention_bias", "mlp_bias", *windows)
    return read


def _seed_config(header: GGUFHeader) -> dict[str, Any]:
    biases = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    found = {key: f"blk.0.{name}.bias" in header.tensors for key, name in biases.items()}
    return decoder_config(header) | found


def _ernie_config(header: GGUFHeader) -> dict[str, Any]:
    return decoder_config(header) | {"use_bias": "blk.0.attn_q.bias" in header.tensors}


_SEED_TENSORS = {name: ours for name, ours in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"}
SEED_GGUF = GGUFArchitecture(
    "SeedOssForCausalLM",
    {**_SEED_TENSORS, "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm"},
    config=_seed_config,
)
ERNIE_GGUF = GGUFArchitecture("Ernie4_5ForCausalLM", config=_ernie_config)
