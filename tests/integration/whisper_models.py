"""Tiny random Whispers with a tokenizer, as folders, and sounds for them."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NAMES = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm",
         "startofprev", "nospeech", "notimestamps")  # fmt: skip
IDS = {name: len(LETTERS) + number for number, name in enumerate(NAMES)}
STAMP = len(LETTERS) + len(NAMES)
"""The first timestamp."""
RATE = 16000


def make(seed: int = 0, **options: Any) -> WhisperForConditionalGeneration:
    """A model whose windows are 2 s long."""
    torch.manual_seed(seed)
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
        "max_source_positions": 100, "max_target_positions": 64, "num_mel_bins": 20,
    }  # fmt: skip
    config = WhisperConfig(
        vocab_size=STAMP + 101,
        pad_token_id=IDS["endoftext"],
        bos_token_id=IDS["endoftext"],
        eos_token_id=IDS["endoftext"],
        decoder_start_token_id=IDS["startoftranscript"],
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **{**sizes, **options},
    )
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(
        eos_token_id=IDS["endoftext"], pad_token_id=IDS["endoftext"],
        decoder_start_token_id=IDS["startoftranscript"], is_multilingual=True,
        lang_to_id={"<|en|>": IDS["en"], "<|de|>": IDS["de"]},
        task_to_id={"translate": IDS["translate"], "transcribe": IDS["transcribe"]},
        no_timestamps_token_id=IDS["notimestamps"], prev_sot_token_id=IDS["startofprev"],
        max_initial_timestamp_index=50, suppress_tokens=[3, 5, *range(257, 266)],
        begin_suppress_tokens=[32, IDS["endoftext"]], max_length=64,
    )  # fmt: skip
    return model


def save(model: WhisperForConditionalGeneration, folder: Path) -> Path:
    """The model's folder, complete."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in NAMES])
    tokenizer.add_tokens([AddedToken(f"<|{n * 0.02:.2f}|>") for n in range(101)])
    tokenizer.save(str(folder / "tokenizer.json"))
    frames = {
        "feature_size": model.config.num_mel_bins,
        "chunk_length": model.config.max_source_positions // 50,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": RATE,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(frames))
    return folder


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Noise and tones whose loudness changes."""
    rng, count = np.random.default_rng(seed), max(1, round(seconds * rate))
    at = np.arange(count) / rate
    tones = np.sin(2 * np.pi * rng.uniform(100, 3000, (4, 1)) * at).sum(axis=0)
    loudness = np.abs(np.sin(2 * np.pi * rng.uniform(0.3, 2) * at + rng.uniform(0, 6)))
    return (0.1 * loudness * (tones + rng.standard_normal(count))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """A WAV file of the samples, the same in all channels."""
    written, whole = io.BytesIO(), np.repeat(samples[:, None], channels, axis=1)
    codes = np.round(whole * (2 ** (8 * width - 1) - 1)).astype("<i8")
    codes += 128 if width == 1 else 0
    with wave.open(written, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(codes[..., None].view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return written.getvalue()
