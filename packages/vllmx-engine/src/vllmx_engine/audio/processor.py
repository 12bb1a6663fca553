"""Audio in conversations: files to windows of log-mel frames, and their tokens in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.audio.decode import AudioLimits, decode
from vllmx_engine.audio.features import LogMel
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.text.model_files import read_json_object
from vllmx_engine.wire.images import Kind
from vllmx_engine.wire.messages import ImageInput

_FRAMES_OF_ROW = 2
_FRAMES_READ = 4
"""Frames that the encoder reads for a row: its own two, and one on each side."""


class AudioFit(Record):
    """A decoded audio and the tokens that it takes."""

    samples: F32
    num_rows: int
    """Rows of each window."""
    num_tokens: int
    num_bytes: int
    """Bytes of its rows."""

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
        bounds, most = AudioLimits(limits.max_bytes, limits.max_seconds), self.frames.seconds
        if not self.hears_silence and most < limits.max_seconds:  # the rest is not even decoded
            bounds = AudioLimits(limits.max_bytes, most, "cut it, the model hears no more")
        samples = yield from decode(data, self.frames.rate, bounds, where)
        return self.fit(samples, where)

    def fit(self, samples: F32, where: str) -> AudioFit:
        """The fit for samples at the model's rate. Raises InvalidRequestError."""
        frames = self.frames
        num_windows, rows = frames.num_windows(samples.size), frames.num_frames // _FRAMES_OF_ROW
        if not self.hears_silence:
            if num_windows > 1:
                raise InvalidRequestError(
                    f"{where} is an audio of {samples.size / frames.rate:.1f} s, the model hears"
                    f" {frames.seconds} s: cut it",
                    param=where,
                )
            tokens = -(-samples.size // (frames.hop * _FRAMES_OF_ROW * self.rows_per_token))
            rows = min(rows, tokens * self.rows_per_token)
        num_tokens = num_windows * (rows // self.rows_per_token)
        num_bytes = num_windows * rows * _FRAMES_READ * frames.num_mels * 4  # bytes of a float
        return AudioFit(samples, rows, num_tokens, num_bytes)

    def inputs(self, start: int, fit: AudioFit) -> Sliced[list[ImageInput]]:
        """The windows of an audio whose first token is at `start`."""
        return self.frames.audio_inputs(fit.samples, fit.num_rows, start, self.rows_per_token)


_NAME = "preprocessor_config.json"


def find_audio_processor(folder: Path) -> AudioProcessor:
    """The processor that a model folder describes. Raises ConfigError for one that is damaged or
    not known."""
    whole, place = read_json_object(folder / "processor_config.json"), str(folder / _NAME)
    inner = whole.get("feature_extractor")
    config = read_json_object(folder / _NAME) or (inner if isinstance(inner, Mapping) else {})
    kind = str(config.get("processor_class") or whole.get("processor_class"))
    if kind == "VoxtralProcessor":
        frames = LogMel.of(config, place)
        return AudioProcessor(frames, "[AUDIO]", ("[BEGIN_AUDIO]", ""), 4, hears_silence=True)
    if kind == "Qwen2AudioProcessor":
        return AudioProcessor(LogMel.of(config, place), "<|AUDIO|>", rows_per_token=2)
    raise ConfigError(
        f"{place} names the processor {shown(kind)}, which prepares no audio here; known:"
        " VoxtralProcessor, Qwen2AudioProcessor"
    )
