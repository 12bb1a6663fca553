"""Tokenizers for the text tests: small ones trained here, real ones where they are at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from vllmx_engine.text.tokenizer import Tokenizer

SHARED = Path(__file__).parents[4] / "shared"

CORPUS = [
    "Once upon a time, in a far-away land, a small engine learnt to serve words.",
    "The quick brown fox jumps over the lazy dog; 1234567890 times (and again).",
    "Ein schöner Tag für Äpfel. Où est la gare? Привет, мир! 你好,世界。",
    "def f(x):\n    return {'a': [x, x + 1]}\n",
] * 3

SPECIAL_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE like Qwen's or Llama 3's, with special and with ordinary added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "<|tool▁call|>", "   ", "é中"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """A byte-fallback BPE in the SentencePiece manner, like Llama 2's or Mistral's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for line in CORPUS for char in line if char.isascii() and char != "\n"})
    pieces += ["▁", *(char for char in letters if char != " ")]
    words = ["▁t", "▁th", "▁the", "▁a", "in", "er", "on", "▁▁", "▁▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("i", "n"), ("e", "r")]
    merges += [("o", "n"), ("▁", "▁"), ("▁▁", "▁")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *words])}
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """A Metaspace tokenizer (T5, XLM-R): no concatenation of bytes describes its decoder."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": metaspace_backend,
}
REAL_FOLDERS = (
    "demo-model",
    "models/stories260K",
    "tokenizers/qwen2.5",
    "tokenizers/qwen3",
    "tokenizers/llama3",
    "tokenizers/phi-3-mini",
    "tokenizers/mistral-v1",
    "tokenizers/mistral-v3",
)


@cache
def tokenizer_named(name: str) -> Tokenizer:
    """One of `BACKENDS`, or a real folder; skips the test where that is not at hand."""
    if name in BACKENDS:
        return Tokenizer(BACKENDS[name](), SPECIAL_CONFIG)
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"{name} needs ../shared")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session", params=[*BACKENDS, *REAL_FOLDERS])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every tokenizer in turn."""
    return tokenizer_named(request.param)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """The small byte-level tokenizer."""
    return tokenizer_named("byte-level")


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """The small SentencePiece style tokenizer."""
    return tokenizer_named("sentencepiece")


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """The small tokenizer that is decoded through a window."""
    return tokenizer_named("metaspace")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of larger real files; skips the test where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED
