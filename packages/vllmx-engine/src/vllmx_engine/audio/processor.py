"""Audio in conversations: files to windows of log-mel frames, and their tokens in prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.audio.decode import AudioLimits, decode
from vllmx_engine.audio.features import LogMel, audio_input, overlapping
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.text.model_files import read_json_object
from vllmx_engine.wire.images import Kind
from vllmx_engine.wire.messages import ImageInput

_FRAMES_OF_ROW = 2
_FRAMES_OF_CHUNK_ROW = 8
_LEAST, _LEAST_ASR = 400, 8000
"""Samples of the shortest audio: those of a Fourier transform, and half a second for Qwen3-ASR."""
_FRAMES_READ = 4
"""Frames that the encoder reads for a row: its own two, and one on each side."""


class AudioFit(Record):
    """A decoded audio and the tokens that it takes."""

    samples: F32
    num_tokens: int
    num_bytes: int
    """Bytes of its rows."""
    num_rows: int = 0
    """Rows of each window."""

    @property
    def runs(self) -> list[int]:
        """Tokens that follow each other in the prompt: all."""
        return [self.num_tokens]


class AudioProcessor(Record):
    """A model's preparation of audio. See `vllmx_engine.images.processor.ImageProcessor` for the
    members with the same names."""

    frames: LogMel
    token: str
    around: tuple[str, str] = ("", "")
    rows_per_token: int = 1
    hears_silence: bool = False
    """The encoder hears whole windows, with the silence behind an audio, and any number of them.
    Otherwise it hears one window, as far as there is sound."""
    kind: Kind = "audio"

    @property
    def mark(self) -> str:
        """The text that the chat template writes for an audio."""
        return self.token

    def written(self, fit: AudioFit) -> str:
        """The text that replaces `mark`."""
        return (self.token * fit.num_tokens).join(self.around)

    def measure(self, data: bytes, limits: ImageLimits, where: str) -> Sliced[AudioFit]:
        """Decodes a file. Raises InvalidRequestError."""
        bounds, most = AudioLimits(limits.max_bytes, limits.max_seconds), self.longest_s
        if most < limits.max_seconds:  # the rest is not even decoded
            bounds = AudioLimits(limits.max_bytes, most, "cut it, the model hears no more")
        samples = yield from decode(data, self.frames.rate, bounds, where)
        return self.fit(samples, where)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest audio."""
        return math.inf if self.hears_silence else self.frames.seconds

    def fit(self, samples: F32, where: str) -> AudioFit:
        """The fit for samples at the model's rate. Raises InvalidRequestError."""
        frames = self.frames
        if samples.size > self.longest_s * frames.rate:
            raise InvalidRequestError(
                f"{where} is an audio of {samples.size / frames.rate:.1f} s, the model hears"
                f" {frames.seconds} s: cut it",
                param=where,
            )
        return self._fit(samples)

    def _fit(self, samples: F32) -> AudioFit:
        frames = self.frames
        num_windows, rows = frames.num_windows(samples.size), frames.num_frames // _FRAMES_OF_ROW
        if not self.hears_silence:
            tokens = -(-samples.size // (frames.hop * _FRAMES_OF_ROW * self.rows_per_token))
            rows = min(rows, tokens * self.rows_per_token)
        num_tokens = num_windows * (rows // self.rows_per_token)
        num_bytes = num_windows * rows * _FRAMES_READ * frames.num_mels * 4  # bytes of a float
        return AudioFit(samples, num_tokens, num_bytes, rows)

    def inputs(self, start: int, fit: AudioFit) -> Sliced[list[ImageInput]]:
        """The windows of an audio whose first token is at `start`."""
        return self.frames.audio_inputs(fit.samples, fit.num_rows, start, self.rows_per_token)


class PieceProcessor(AudioProcessor):
    """Preparation for an encoder that hears pieces, the last of them as far as there is sound."""

    piece: int = 200
    """Frames of a piece."""
    chunk: int = 0
    """Frames of a chunk of a piece: eight make a row, the last one of a chunk has the rest. 0: two
    make a row, as Whisper's convolutions read them."""
    least: int = _LEAST
    """Samples of the shortest audio, to which others are padded."""

    @property
    def longest_s(self) -> float:
        """See `AudioProcessor`."""
        return math.inf if self.chunk else self.frames.seconds

    def _rows(self, frames: int) -> int:
        if not self.chunk:
            return frames // _FRAMES_OF_ROW
        whole, rest = divmod(frames, self.chunk)
        return whole * -(-self.chunk // _FRAMES_OF_CHUNK_ROW) + -(-rest // _FRAMES_OF_CHUNK_ROW)

    def _fit(self, samples: F32) -> AudioFit:
        frames = self.frames
        step = 1 if self.chunk else frames.hop * _FRAMES_OF_ROW * self.rows_per_token
        size = -(-max(samples.size, self.least) // step) * step
        whole, rest = divmod(size // frames.hop, self.piece)
        num_rows = whole * self._rows(self.piece) + self._rows(rest)
        num_frames = num_rows * (_FRAMES_OF_CHUNK_ROW if self.chunk else _FRAMES_READ)
        if size > samples.size:  # else an hour would be copied
            samples = np.pad(samples, (0, size - samples.size))
        num_bytes = num_frames * frames.num_mels * 4  # bytes of a float
        return AudioFit(samples, num_rows // self.rows_per_token, num_bytes)

    def inputs(self, start: int, fit: AudioFit) -> Sliced[list[ImageInput]]:
        """The pieces of an audio whose first token is at `start`."""
        count = fit.samples.size // self.frames.hop
        samples = fit.samples if self.chunk else np.pad(fit.samples, (0, self.frames.size))
        frames = yield from self.frames.frames(samples)
        found: list[ImageInput] = []
        for begin in range(0, count, self.piece):
            some = frames[begin : min(begin + self.piece, count)]
            rows = self._chunks(some) if self.chunk else overlapping(some, self._rows(len(some)))
            found.append(audio_input(rows, start, self.rows_per_token))
            start += found[-1].num_tokens
            yield
        return found

    def _chunks(self, frames: F32) -> F32:
        found = []
        for begin in range(0, len(frames), self.chunk):
            some = frames[begin : begin + self.chunk]
            padded = np.pad(some, ((0, -len(some) % _FRAMES_OF_CHUNK_ROW), (0, 0)))
            found.append(padded.reshape(-1, _FRAMES_OF_CHUNK_ROW * self.frames.num_mels))
        return np.concatenate(found)


_NAME = "preprocessor_config.json"
_KNOWN = (
    "VoxtralProcessor",
    "Qwen2AudioProcessor",
    "Qwen2_5OmniProcessor",
    "Qwen3ASRProcessor",
    "Qwen3OmniMoeProcessor",
)


def find_audio_processor(folder: Path) -> AudioProcessor:
    """The processor that a model folder describes. Raises ConfigError for one that is damaged or
    not known."""
    whole, place = read_json_object(folder / "processor_config.json"), str(folder / _NAME)
    inner = whole.get("feature_extractor")
    config = read_json_object(folder / _NAME) or (inner if isinstance(inner, Mapping) else {})
    kind = str(config.get("processor_class") or whole.get("processor_class"))
    if kind not in _KNOWN:
        raise ConfigError(
            f"{place} names the processor {shown(kind)}, which prepares no audio here; known:"
            f" {', '.join(_KNOWN)}"
        )
    if kind == "VoxtralProcessor":
        frames = LogMel.of(config, place)
        return AudioProcessor(frames, "[AUDIO]", ("[BEGIN_AUDIO]", ""), 4, hears_silence=True)
    if kind == "Qwen2AudioProcessor":
        return AudioProcessor(LogMel.of(config, place), "<|AUDIO|>", rows_per_token=2)
    frames = LogMel.of({"feature_size": 128, **config}, place)
    config = read_json_object(folder / "config.json")
    audio = config.get("thinker_config", config).get("audio_config", {})  # which the model checks
    if kind == "Qwen2_5OmniProcessor":
        piece = 2 * audio.get("n_window", 100)
        return PieceProcessor(frames, "<|AUDIO|>", rows_per_token=2, piece=piece)
    piece, chunk = audio.get("n_window_infer", 800), 2 * audio.get("n_window", 50)
    least = _LEAST_ASR if kind == "Qwen3ASRProcessor" else _LEAST
    return PieceProcessor(frames, "<|audio_pad|>", piece=piece, chunk=chunk, least=least)
