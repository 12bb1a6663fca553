"""Tiny random models that hear in chats, and what transformers says of their prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)

SECONDS = 2
"""A window."""
AUDIO, BEGIN, END = 90, 91, 92
TRANSCRIPTION = {"<s>": 93, "[INST]": 94, "[TRANSCRIBE]": 95, "lang:de": 96}
"""Voxtral's tokens of transcriptions."""
ASR = {"<asr_text>": 93, "<|im_start|>": 94, "<|im_end|>": 95}
"""Qwen3-ASR's."""
_TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXTRACTOR = WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)


def _random(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = kind(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def voxtral() -> Any:
    """Four rows make a token."""
    tower = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_mel_bins": 20, "max_source_positions": 50 * SECONDS,
    }  # fmt: skip
    text = _TEXT | {"model_type": "llama", "head_dim": 16}
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=AUDIO)
    return _random(VoxtralForConditionalGeneration, config)


def qwen2_audio() -> Any:
    """Two rows make a token."""
    tower = {
        "d_model": 32, "encoder_ffn_dim": 40, "encoder_layers": 2, "encoder_attention_heads": 4,
        "num_mel_bins": 20, "max_source_positions": 50 * SECONDS,
    }  # fmt: skip
    text = _TEXT | {"model_type": "qwen2"}
    config = Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=AUDIO)
    return _random(Qwen2AudioForConditionalGeneration, config)


_TOWER: dict[str, Any] = {
    "d_model": 32, "encoder_ffn_dim": 40, "encoder_layers": 2, "encoder_attention_heads": 4,
    "num_mel_bins": 20, "output_dim": 48,
}  # fmt: skip
_DOWNSAMPLING = _TOWER | {"downsample_hidden_size": 6, "n_window_infer": 200}
_TURNS = {
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
}
_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip


def qwen3_asr() -> Any:
    """Pieces of two chunks."""
    text = _TEXT | {"model_type": "qwen3", "head_dim": 12}
    config = Qwen3ASRConfig(
        audio_config=_DOWNSAMPLING, text_config=text, audio_token_id=AUDIO,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _random(Qwen3ASRForConditionalGeneration, config)


def qwen2_5_omni() -> Any:
    """Pieces of two seconds; two rows make a token."""
    config = Qwen2_5OmniThinkerConfig(
        audio_config=_TOWER, text_config=_TEXT | _TURNS, vision_config=_VISION,
        audio_token_index=AUDIO, audio_start_token_id=BEGIN, audio_end_token_id=END,
    )  # fmt: skip
    config.vision_start_token_id, config.vision_end_token_id = 88, 89  # which it reads
    return _random(Qwen2_5OmniThinkerForConditionalGeneration, config)


def qwen3_omni() -> Any:
    """Two experts of four."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=_DOWNSAMPLING, text_config=_TEXT | _TURNS | experts,
        vision_config=_VISION, audio_token_id=AUDIO, audio_start_token_id=BEGIN,
    )  # fmt: skip
    config.vision_start_token_id, config.vision_end_token_id = 88, 89
    return _random(Qwen3OmniMoeThinkerForConditionalGeneration, config)


@dataclass(frozen=True)
class Family:
    """How a model's audio is prepared for transformers."""

    make: Callable[[], Any]
    processor: str
    marks: tuple[str, str, str]
    """The audio token and those around it."""
    template_type: str
    """The type by which its template knows audio."""
    longest: int | None = None
    """Seconds of the longest audio."""
    least: int = 0
    """Samples of the shortest audio."""

    @property
    def is_thinker(self) -> bool:
        """The published checkpoint holds a thinker, as `published` writes it."""
        return self.processor.startswith(("Qwen2_5", "Qwen3"))

    def published(self, folder: Path) -> None:
        """Turns a checkpoint of transformers into the published form."""
        config = json.loads((folder / "config.json").read_text())
        config = {"model_type": config["model_type"], "thinker_config": config}
        config["architectures"] = [
            {
                "Qwen2_5OmniProcessor": "Qwen2_5OmniModel",
                "Qwen3ASRProcessor": "Qwen3ASRForConditionalGeneration",
                "Qwen3OmniMoeProcessor": "Qwen3OmniMoeForConditionalGeneration",
            }[self.processor]
        ]
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            if self.processor == "Qwen3ASRProcessor":
                name = name.replace("model.language_model.", "model.")
                name = name.replace("model.audio_tower.", "audio_tower.")
                name = name.replace("model.multi_modal_projector.linear_", "audio_tower.proj")
            tensors[f"thinker.{name}"] = tensor
        save_file(tensors, folder / "model.safetensors")

    @property
    def is_downsampled(self) -> bool:
        """Chunks of a second make 13 tokens."""
        return self.processor.startswith("Qwen3")

    @property
    def hears_silence(self) -> bool:
        """Whole windows, any number of them."""
        return self.processor == "VoxtralProcessor"

    def tokens(self, samples: np.ndarray) -> int:
        """Places of an audio in the prompt."""
        if self.hears_silence:
            return -(-samples.size // (SECONDS * 16000)) * SECONDS * 50 // 4
        if self.is_downsampled:
            chunks, rest = divmod(max(samples.size, self.least) // 160, 100)
            return 13 * chunks + -(-rest // 8)
        return -(-samples.size // 640)

    def ids(self, *parts: np.ndarray | int) -> list[int]:
        """A prompt of words and audio."""
        found: list[int] = []
        for part in parts:
            if isinstance(part, int):
                found.append(part)
            else:
                end = [] if self.hears_silence else [END]
                found += [BEGIN, *[AUDIO] * self.tokens(part), *end]
        return found

    def given(self, audio: list[np.ndarray]) -> dict[str, Any]:
        """The audio for transformers."""
        if not audio:
            return {}
        if self.hears_silence:
            size, found = SECONDS * 16000, []
            for one in audio:  # as VoxtralProcessor does
                frames = EXTRACTOR(
                    one, sampling_rate=16000, padding=True, truncation=False,
                    pad_to_multiple_of=size, return_tensors="pt",
                )["input_features"]  # fmt: skip
                found.append(frames.reshape(20, -1, SECONDS * 100).transpose(0, 1))
            return {"input_features": torch.cat(found)}
        if self.is_downsampled:
            return self._each_alone(audio)
        whole = [np.pad(one, (0, -one.size % 640)) for one in audio]
        extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=self.longest)
        frames = extractor(
            whole, sampling_rate=16000, padding="max_length", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        return {
            "input_features": frames["input_features"],
            "feature_attention_mask": frames["attention_mask"],
        }

    def _each_alone(self, audio: list[np.ndarray]) -> dict[str, Any]:
        """Frames of each audio, then zeros up to whole chunks of the longest."""
        is_asr = self.processor == "Qwen3ASRProcessor"
        kind = Qwen3ASRFeatureExtractor if is_asr else WhisperFeatureExtractor
        found = [
            kind(feature_size=20)(
                one, sampling_rate=16000, padding=True, truncation=False, return_tensors="pt"
            )["input_features"][0]
            for one in audio
        ]
        counts = [max(one.size, self.least) // 160 for one in audio]
        longest = -(-max(counts) // 100) * 100
        given, mask = torch.zeros(len(audio), 20, longest), torch.zeros(len(audio), longest)
        for row, (frames, count) in enumerate(zip(found, counts, strict=True)):
            given[row, :, :count] = frames[:, :count]
            mask[row, :count] = 1
        name = "input_features_mask" if is_asr else "feature_attention_mask"
        return {"input_features": given, name: mask.long()}

    @torch.inference_mode()
    def features(self, model: Any, audio: list[np.ndarray]) -> list[np.ndarray]:
        """(n, width) of each audio, by the tower and the projector of transformers."""
        if self.hears_silence:
            given = self.given(audio)["input_features"]
            found = model.get_audio_features(given, return_dict=True).pooler_output
            return np.split(np.asarray(found), len(audio))
        ids, kept = self.ids(*audio), list[torch.Tensor]()
        inner = model.model if hasattr(model.model, "language_model") else model
        text = inner.language_model if hasattr(inner, "language_model") else inner.model
        hook = text.register_forward_pre_hook(
            lambda _, __, given: kept.append(given["inputs_embeds"][0]), with_kwargs=True
        )
        self.logits(model, ids, audio)
        hook.remove()
        embeddings = kept[0].numpy()[np.asarray(ids) == AUDIO]
        return np.split(embeddings, np.cumsum([self.tokens(one) for one in audio])[:-1])

    @torch.inference_mode()
    def logits(self, model: Any, ids: list[int], audio: list[np.ndarray]) -> np.ndarray:
        """(T, V) by transformers."""
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens)
        found = model(input_ids=tokens, attention_mask=mask, **self.given(audio))
        return np.asarray(found.logits[0])


_MARKS = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
FAMILIES = {
    "voxtral": Family(
        voxtral, "VoxtralProcessor", ("[AUDIO]", "[BEGIN_AUDIO]", "[/INST]"), "input_audio"
    ),
    "qwen2_audio": Family(
        qwen2_audio,
        "Qwen2AudioProcessor",
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "audio",
        SECONDS,
    ),
    "qwen3_asr": Family(qwen3_asr, "Qwen3ASRProcessor", _MARKS, "audio", least=8000),
    "qwen2_5_omni": Family(
        qwen2_5_omni,
        "Qwen2_5OmniProcessor",
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "audio",
        6,
    ),
    "qwen3_omni": Family(qwen3_omni, "Qwen3OmniMoeProcessor", _MARKS, "audio"),
}


def save(family: Family, model: Any, folder: Path) -> Path:
    """The checkpoint's folder, with a tokenizer of the words w0, w1 ... and a chat template."""
    model.save_pretrained(folder)
    audio, begin, end = family.marks
    ids = {audio: AUDIO, begin: BEGIN, end: END}
    if family.hears_silence:
        ids |= TRANSCRIPTION
    named = {}
    if family.processor == "Qwen3ASRProcessor":
        ids |= ASR
        named = {"language": 86, "German": 87}
    known = (*ids.values(), *named.values())
    words = {f"w{index}": index for index in range(97) if index not in known}
    tokenizer = Tokenizer(WordLevel({**words, **named, **ids}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ids])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = audio if family.processor == "VoxtralProcessor" else f"{begin}{audio}{end}"
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        f"{{% if part.type == '{family.template_type}' %}}{written}"
        "{% else %} {{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %} w11"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    frames = {
        "feature_size": 20, "chunk_length": family.longest or SECONDS, "hop_length": 160,
        "n_fft": 400, "sampling_rate": 16000, "processor_class": family.processor,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(frames))
    return folder
