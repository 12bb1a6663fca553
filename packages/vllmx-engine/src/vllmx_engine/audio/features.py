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
        if not sound or config.get("dither") or found[3] > found[2] or found[4] > 60:
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

    def frames(self, samples: F32) -> Sliced[F32]:
        """(n, mels) of samples, padded with silence to whole windows, each of them a slice."""
        padded = np.zeros(self.num_windows(samples.size) * self.num_samples, np.float32)
        padded[: samples.size] = samples
        half = self.size // 2
        padded = np.pad(padded, half, mode="reflect")
        pieces = np.lib.stride_tricks.sliding_window_view(padded, self.size)[:: self.hop][:-1]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.size) / self.size)
        filters, mels = self._filters.T, np.empty((len(pieces), self.num_mels), np.float32)
        for begin in range(0, len(pieces), self.num_frames):  # an hour's pieces take gigabytes
            some = slice(begin, begin + self.num_frames)
            power = np.abs(np.fft.rfft(pieces[some] * hann, axis=1)) ** 2
            mels[some] = np.log10(np.maximum(power @ filters, _FLOOR))
            yield
        found: F32 = (np.maximum(mels, mels.max() - _RANGE) + 4.0) / 4.0
        return found

    def audio_inputs(
        self, samples: F32, count: int, start: int, rows_per_token: int = 1
    ) -> Sliced[list[ImageInput]]:
        """The audio as the core takes it, `count` rows of each window. A row has the frames that
        the encoder reads for it: the one before its own two, these, and the one behind. Zeros
        surround a window."""
        frames, num_tokens = (yield from self.frames(samples)), count // rows_per_token
        at = 2 * np.arange(count)[:, None] + np.arange(_FRAMES_OF_ROW)
        found: list[ImageInput] = []
        for begin in range(0, len(frames), self.num_frames):
            window = np.pad(frames[begin : begin + self.num_frames], ((1, 1), (0, 0)))
            rows = window[at].tobytes()
            digest = hashlib.blake2b(rows, digest_size=32, person=b"audio").digest()
            place = start + len(found) * num_tokens
            found.append(ImageInput(place, num_tokens, digest, (1, 1, count), rows, b""))
            yield
        return found


def _mel(hertz: F32) -> F32:
    """Slaney's scale: linear up to 1000 Hz, logarithmic from there on."""
    high = np.maximum(hertz, 1000.0) / 1000.0
    return np.where(hertz >= 1000.0, 15.0 + np.log(high) * (27.0 / np.log(6.4)), 3 * hertz / 200)


def _hertz(mel: F32) -> F32:
    high = 1000.0 * np.exp((np.log(6.4) / 27.0) * (np.maximum(mel, 15.0) - 15.0))
    return np.where(mel >= 15.0, high, 200.0 * mel / 3.0)
