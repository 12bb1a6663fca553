"""Log-mel frames of Whisper's encoders, equal to those of transformers' WhisperFeatureExtractor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import ConfigError
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.audio.slices import Sliced
from vllmx_engine.wire.messages import ImageInput

_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten between the loudest value and the quietest one that counts."""
_FRAMES_OF_ROW = 4
_SLICE = 3000
"""Frames that are made at a time."""
_MOST_S = 300
_NEEDED = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "chunk_length": 30}


class LogMel(Record):
    """The sizes by which samples become frames."""

    num_mels: int
    rate: int
    """Samples a second."""
    size: int
    """Samples of a Fourier transform."""
    hop: int
    """Samples from one frame to the next."""
    seconds: int
    """The length that the encoder hears, to which shorter audio is padded with silence."""

    @classmethod
    def of(cls, config: Mapping[str, Any], place: str) -> LogMel:
        """Reads a preprocessor_config.json. Raises ConfigError."""
        numbers = {"feature_size": 80, **_NEEDED, **config}
        found = [numbers[name] for name in ("feature_size", *_NEEDED)]
        sound = all(type(one) is int and 0 < one <= 1 << 16 for one in found)
        if not sound or config.get("dither") or found[3] > found[2] or found[4] > _MOST_S:
            raise ConfigError(
                f"{place} describes no log-mel frames that can be made here: download it again"
            )
        return cls(*found)

    @property
    def num_samples(self) -> int:
        """Samples of the longest audio."""
        return self.rate * self.seconds

    @property
    def _filters(self) -> F32:
        """(mels, size / 2 + 1) triangles over Slaney's mel scale, each of area 1."""
        top = _mel(np.array([self.rate / 2]))[0]
        corners = _hertz(np.linspace(0.0, top, self.num_mels + 2))
        bins = np.linspace(0, self.rate // 2, self.size // 2 + 1)
        width = np.diff(corners)
        slopes = corners[:, None] - bins[None]  # (mels + 2, bins)
        rising, falling = -slopes[:-2] / width[:-1, None], slopes[2:] / width[1:, None]
        triangles = np.maximum(0, np.minimum(rising, falling))
        found: F32 = triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]
        return found

    @property
    def num_frames(self) -> int:
        """Frames of a window, the longest audio that an encoder hears at once."""
        return self.num_samples // self.hop

    def num_windows(self, num_samples: int) -> int:
        """Windows that hold so many samples."""
        return max(1, -(-num_samples // self.num_samples))

    def padded(self, samples: F32) -> F32:
        """The samples and silence behind them, whole windows together."""
        padded = np.zeros(self.num_windows(samples.size) * self.num_samples, np.float32)
        padded[: samples.size] = samples
        return padded

    def frames(self, samples: F32) -> Sliced[F32]:
        """(n, mels), one for each whole `hop` of samples."""
        padded = np.pad(samples, self.size // 2, mode="reflect")
        pieces = np.lib.stride_tricks.sliding_window_view(padded, self.size)[:: self.hop][:-1]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.size) / self.size)
        filters, mels = self._filters.T, np.empty((len(pieces), self.num_mels), np.float32)
        for begin in range(0, len(pieces), _SLICE):  # an hour's pieces take gigabytes
            some = slice(begin, begin + _SLICE)
            power = np.abs(np.fft.rfft(pieces[some] * hann, axis=1)) ** 2
            mels[some] = np.log10(np.maximum(power @ filters, _FLOOR))
            yield
        found: F32 = (np.maximum(mels, mels.max() - _RANGE) + 4.0) / 4.0
        return found

    def audio_inputs(
        self, samples: F32, count: int, start: int, rows_per_token: int = 1
    ) -> Sliced[list[ImageInput]]:
        """The audio as the core takes it, padded with silence to whole windows: `count` rows of
        each."""
        frames = yield from self.frames(self.padded(samples))
        found: list[ImageInput] = []
        for begin in range(0, len(frames), self.num_frames):
            rows = overlapping(frames[begin : begin + self.num_frames], count)
            place = start + len(found) * (count // rows_per_token)
            found.append(audio_input(rows, place, rows_per_token))
            yield
        return found


def overlapping(frames: F32, count: int) -> F32:
    """(count, 4 * mels): two frames in each row, the one before and the one behind, as Whisper's
    convolutions read them. Zeros surround the frames."""
    padded = np.pad(frames, ((1, 1), (0, 0)))
    at = 2 * np.arange(count)[:, None] + np.arange(_FRAMES_OF_ROW)
    found: F32 = padded[at].reshape(count, -1)
    return found


def audio_input(rows: F32, start: int, rows_per_token: int = 1) -> ImageInput:
    """A piece of an audio as the core takes it, its first token at `start`."""
    data, grid = rows.tobytes(), (1, 1, len(rows))
    digest = hashlib.blake2b(data, digest_size=32, person=b"audio").digest()
    return ImageInput(start, len(rows) // rows_per_token, digest, grid, data, b"")


def _mel(hertz: F32) -> F32:
    """Slaney's scale: linear up to 1000 Hz, logarithmic from there on."""
    high = np.maximum(hertz, 1000.0) / 1000.0
    return np.where(hertz >= 1000.0, 15.0 + np.log(high) * (27.0 / np.log(6.4)), 3 * hertz / 200)


def _hertz(mel: F32) -> F32:
    high = 1000.0 * np.exp((np.log(6.4) / 27.0) * (np.maximum(mel, 15.0) - 15.0))
    return np.where(mel >= 15.0, high, 200.0 * mel / 3.0)
