"""Text models that hear (VoxtralForConditionalGeneration, arXiv 2507.13264, and
Qwen2AudioForConditionalGeneration, arXiv 2407.10759): Whisper's encoder and a projector make the
embeddings of audio tokens, in front of Llama and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec

from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import inside_images, text_config
from vllmx_models.families.llama import llama
from vllmx_models.families.qwen import qwen2
from vllmx_models.families.whisper import whole_heads
from vllmx_models.towers.whisper import ChatTower
from vllmx_models.trunks.decoder import Decoder

_VOXTRAL_TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}
_QWEN2_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
"""Defaults of keys that configs omit."""


def voxtral(config: Mapping[str, Any]) -> Decoder:
    """An audio token is some rows of the encoder side by side, projected twice."""
    outer = ConfigReader(config, "VoxtralForConditionalGeneration")
    read = outer.part("audio_config")
    size, joined = read.integer("hidden_size", 1280), read.integer("intermediate_size", 5120)
    if joined % size:
        raise read.error("intermediate_size", f"must be a multiple of hidden_size = {size}")
    tower = {
        "depth": read.integer("num_hidden_layers", 32, high=1024),
        "hidden_size": size,
        "num_heads": whole_heads(read, "num_attention_heads", size, 20),
        "mlp_size": joined,
        "merge": joined // size,
        "joins": True,
        "projector": ("linear_1", "linear_2"),
        "projector_activation": outer.activation("projector_hidden_act", "gelu"),
    }
    return _hearing(config, llama(text_config(config, _VOXTRAL_TEXT)), read, tower)


def qwen2_audio(config: Mapping[str, Any]) -> Decoder:
    """An audio token is the mean of two rows of the encoder, projected."""
    read = ConfigReader(config, "Qwen2AudioForConditionalGeneration").part("audio_config")
    size = read.integer("d_model", 1280)
    tower = {
        "depth": read.integer("encoder_layers", 32, high=1024),
        "hidden_size": size,
        "num_heads": whole_heads(read, "encoder_attention_heads", size, 20),
        "mlp_size": read.integer("encoder_ffn_dim", 5120),
        "merge": 2,
        "projector": ("linear",),
        "projector_bias": True,
    }
    return _hearing(config, qwen2(text_config(config, _QWEN2_TEXT)), read, tower)


def _hearing(
    config: Mapping[str, Any], text: Decoder, read: ConfigReader, tower: dict[str, Any]
) -> Decoder:
    if read.flag("scale_embedding", False):
        raise read.error("scale_embedding", "must be false")
    width = text.spec.hidden_size
    features = FeatureSpec(1, width, is_audio=True)
    encoder = ChatTower(
        mels=read.integer("num_mel_bins", 128, high=1024),
        activation=read.activation("activation_function", "gelu"),
        positions=read.integer("max_source_positions", 1500, high=1 << 14),
        module="audio_tower",
        out_size=width,
        **tower,
    )
    return Decoder(replace(text.spec, names=inside_images(config), features=features), encoder)
