"""Text models that hear (VoxtralForConditionalGeneration, arXiv 2507.13264;
Qwen2AudioForConditionalGeneration, arXiv 2407.10759; Qwen2.5-Omni, arXiv 2503.20215; Qwen3-Omni,
arXiv 2509.17765; Qwen3-ASR): Whisper's encoder or one like it, and a projector, make the embeddings
of audio tokens, in front of Llama and Qwen. The tokens of an audio have consecutive positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec
from vllmx_core.ops.downsample import FRAMES

from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import inside_images, text_config
from vllmx_models.families.llama import llama
from vllmx_models.families.qwen import qwen2, qwen3
from vllmx_models.families.qwen_images import without_sections
from vllmx_models.families.qwen_moe import qwen3_moe
from vllmx_models.families.whisper import whole_heads
from vllmx_models.text_types import TEXT_TYPES
from vllmx_models.towers.qwen_audio import DownsampledTower, PieceTower
from vllmx_models.towers.whisper import ChatTower
from vllmx_models.trunks.decoder import Decoder, ModelNames

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
    tower: dict[str, Any] = {
        "mels": read.integer("num_mel_bins", 128, high=1024),
        "activation": read.activation("activation_function", "gelu"),
        "positions": read.integer("max_source_positions", 1500, high=1 << 14),
        "module": "audio_tower",
        "depth": read.integer("num_hidden_layers", 32, high=1024),
        "hidden_size": size,
        "num_heads": whole_heads(read, "num_attention_heads", size, 20),
        "mlp_size": joined,
        "merge": joined // size,
        "joins": True,
        "projector": ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
        "projector_activation": outer.activation("projector_hidden_act", "gelu"),
    }
    if read.flag("scale_embedding", False):
        raise read.error("scale_embedding", "must be false")
    text = llama(text_config(config, _VOXTRAL_TEXT))
    encoder = ChatTower(**tower, out_size=text.spec.hidden_size)
    return _with_ears(text, encoder, inside_images(config))


def qwen2_audio(config: Mapping[str, Any]) -> Decoder:
    """An audio token is the mean of two rows of the encoder, projected."""
    read = ConfigReader(config, "Qwen2AudioForConditionalGeneration").part("audio_config")
    tower = {
        **_whisper_sizes(read, read.integer("d_model", 1280)),
        "positions": read.integer("max_source_positions", 1500, high=1 << 14),
        "merge": 2,
        "projector": ("multi_modal_projector.linear",),
        "projector_bias": True,
    }
    text = qwen2(text_config(config, _QWEN2_TEXT))
    encoder = ChatTower(**tower, out_size=text.spec.hidden_size)
    return _with_ears(text, encoder, inside_images(config))


def qwen3_asr(config: Mapping[str, Any]) -> Decoder:
    """The published files hold a thinker; transformers saves the same without it."""
    thinker = _thinker(config)
    names = ("audio_tower.proj1", "audio_tower.proj2")
    if thinker is config:
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
    text = qwen3(_thinking(thinker, _QWEN3_ASR_TEXT))
    return _downsampling(thinker, "Qwen3ASRForConditionalGeneration", text, names)


def qwen3_omni_moe(config: Mapping[str, Any]) -> Decoder:
    """The thinker with text and audio; it answers in text."""
    thinker, names = _thinker(config), ("audio_tower.proj1", "audio_tower.proj2")
    text = qwen3_moe(_thinking(thinker, TEXT_TYPES["qwen3_moe"]["qwen3_omni_moe_text"]))
    return _downsampling(thinker, "Qwen3OmniMoeForConditionalGeneration", text, names)


def qwen2_5_omni(config: Mapping[str, Any]) -> Decoder:
    """The thinker with text and audio; it answers in text."""
    thinker = _thinker(config)
    read = ConfigReader(thinker, "Qwen2_5OmniForConditionalGeneration").part("audio_config")
    text = qwen2(_thinking(thinker, TEXT_TYPES["qwen2"]["qwen2_5_omni_text"]))
    rows = read.integer("n_window", 100, high=1 << 12)
    size = read.integer("d_model", 1280)
    tower = PieceTower(
        **_whisper_sizes(read, size),
        positions=rows,
        merge=2,
        projector=("audio_tower.proj",),
        projector_bias=True,
        out_size=_out_size(read, text, 3584),
    )
    return _with_ears(text, tower, _THINKER)


_QWEN3_ASR_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
_THINKER = ModelNames(
    "thinker.model.embed_tokens",
    "thinker.model.layers",
    "thinker.model.norm",
    "thinker.lm_head",
    also=("thinker.model.", "model."),
)


def _thinker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the model that answers in text."""
    found = config.get("thinker_config")
    return found if isinstance(found, Mapping) else config


def _thinking(thinker: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    return without_sections(text_config(thinker, defaults))[0]


def _downsampling(
    config: Mapping[str, Any], architecture: str, text: Decoder, projector: tuple[str, str]
) -> Decoder:
    read = ConfigReader(config, architecture).part("audio_config")
    size, window = read.integer("d_model", 1280), read.integer("n_window", 50)
    piece = read.integer("n_window_infer", 800, high=1 << 14)
    if window != _WINDOW or piece % (2 * window):
        raise read.error(
            "n_window", f"must be {_WINDOW}, and n_window_infer a multiple of twice it"
        )
    chunk_rows = -(-2 * window // FRAMES)
    tower = DownsampledTower(
        **_whisper_sizes(read, size),
        positions=piece // (2 * window) * chunk_rows,
        channels=read.integer("downsample_hidden_size", 480),
        frames=2 * window,
        merge=1,
        projector=projector,
        inner_size=size,
        projector_bias=True,
        projector_activation=read.activation("activation_function", "gelu"),
        out_size=_out_size(read, text, 3584),
    )
    is_thinker = projector[0].startswith("audio_tower.")
    names = _THINKER if is_thinker else replace(_THINKER, also=("thinker.model.", _INSIDE))
    return _with_ears(text, tower, names)


_WINDOW = 50
"""Half the frames of a chunk; for others the published code counts tokens in another way."""
_INSIDE = "model.language_model."


def _whisper_sizes(read: ConfigReader, size: int) -> dict[str, Any]:
    """The fields of a `WhisperTower` that encoders of Qwen have under the same keys."""
    if read.flag("scale_embedding", False):
        raise read.error("scale_embedding", "must be false")
    return {
        "depth": read.integer("encoder_layers", 32, high=1024),
        "hidden_size": size,
        "num_heads": whole_heads(read, "encoder_attention_heads", size, 20),
        "mlp_size": read.integer("encoder_ffn_dim", 5120),
        "mels": read.integer("num_mel_bins", 128, high=1024),
        "activation": read.activation("activation_function", "gelu"),
        "module": "audio_tower",
    }


def _out_size(read: ConfigReader, text: Decoder, default: int) -> int:
    found = read.integer("output_dim", default)
    if found != text.spec.hidden_size:
        raise read.error("output_dim", f"must be the text's hidden_size = {text.spec.hidden_size}")
    return found


def _with_ears(text: Decoder, tower: ChatTower, names: ModelNames) -> Decoder:
    features = FeatureSpec(1, tower.out_size, is_audio=True)
    return Decoder(replace(text.spec, names=names, features=features), tower)
