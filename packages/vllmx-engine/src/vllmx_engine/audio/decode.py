"""Files of audio, which are untrusted, to mono samples at one rate."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.audio.slices import Sliced

_MOST_CHANNELS = 32
_RATES = (1000, 192_000)
_TAPS = 16
"""Zero crossings of the resampling filter on each side."""
_PIECE = 1 << 13
_READ = 1 << 18
_READ_S = 8
"""Frames and seconds that are decoded at a time."""


class AudioLimits(Record):
    """Bounds on one file."""

    max_bytes: int
    max_seconds: float
    remedy: str = "cut it, or raise --max-audio-seconds"

    def check_bytes(self, size: int, where: str) -> None:
        """Raises InvalidRequestError for a file that is too large."""
        if size > self.max_bytes:
            raise InvalidRequestError(
                f"{where} is a file of more than {self.max_bytes} bytes: send a smaller one, or"
                " raise --max-audio-bytes",
                param=where,
            )

    def most_frames(self, rate: int, channels: int, where: str) -> int:
        """Frames that are read of such a file: one more than allowed. Raises
        InvalidRequestError."""
        if not _RATES[0] <= rate <= _RATES[1] or not 1 <= channels <= _MOST_CHANNELS:
            raise InvalidRequestError(
                f"{where} has {channels} channels of {rate} Hz: send 1 to {_MOST_CHANNELS} of"
                f" {_RATES[0]} to {_RATES[1]} Hz",
                param=where,
            )
        return int(self.max_seconds * rate) + 1


def decode(data: bytes, rate: int, limits: AudioLimits, where: str) -> Sliced[F32]:
    """The samples of a file at `rate`. Raises InvalidRequestError."""
    limits.check_bytes(len(data), where)
    found: list[F32] = []
    resampler: Resampler | None = None
    left = 0
    for samples, own_rate in _pieces(data, limits, where):
        if resampler is None:
            resampler, left = Resampler(own_rate, rate), int(limits.max_seconds * own_rate)
        left -= len(samples)
        if left < 0:
            raise InvalidRequestError(
                f"{where} is an audio of more than {limits.max_seconds:g} s: {limits.remedy}",
                param=where,
            )
        mono: F32 = samples.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise InvalidRequestError(
                f"{where} has samples that are not finite: send another file", param=where
            )
        found.append(resampler.feed(np.clip(mono, -1.0, 1.0)))
        yield
    if resampler is None:
        raise InvalidRequestError(f"{where} has no samples: send an audio", param=where)
    return np.concatenate([*found, resampler.rest()])


def _pieces(data: bytes, limits: AudioLimits, where: str) -> Iterator[tuple[F32, int]]:
    """(frames, channels) and their rate, piece by piece: compressed silence of an hour is a small
    file, and would not fit in memory with all its channels."""
    whole = _read(data, limits, where)
    if whole is not None:
        raw, rate, width, channels = whole
        frame = width * channels
        step = min(_READ, _READ_S * rate) * frame
        for begin in range(0, len(raw) // frame * frame, step):
            yield _pcm(raw[begin : begin + step], width, channels), rate
        return
    try:
        import soundfile  # an extra
    except ImportError:
        raise InvalidRequestError(
            f"{where} is not a WAV file of PCM samples, and other files need soundfile: send WAV,"
            " or pip install 'vllmx[audio]'",
            param=where,
        ) from None
    yield from _by_library(soundfile, data, limits, where)


def _read(data: bytes, limits: AudioLimits, where: str) -> tuple[bytes, int, int, int] | None:
    """The frames of a WAV file, their rate, bytes of a sample and channels; None: it is another
    file."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            raw = file.readframes(limits.most_frames(rate, channels, where))
        return (raw, rate, width, channels) if 1 <= width <= 4 else None
    except InvalidRequestError:
        raise
    except Exception:  # wave raises what it likes; the library may know the file
        return None


def _by_library(
    library: Any, data: bytes, limits: AudioLimits, where: str
) -> Iterator[tuple[F32, int]]:
    try:
        with library.SoundFile(io.BytesIO(data)) as file:
            rate = int(file.samplerate)
            left, most = limits.most_frames(rate, file.channels, where), min(_READ, _READ_S * rate)
            while left > 0 and len(piece := file.read(min(left, most), "float32", always_2d=True)):
                left -= len(piece)
                yield piece, rate
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever the library raises is the file's
        raise InvalidRequestError(
            f"{where} cannot be read as audio: send WAV, FLAC, MP3 or OGG", param=where
        ) from error


def _pcm(raw: bytes, width: int, channels: int) -> F32:
    """(frames, channels) of little-endian samples; unsigned with one byte, as in WAV."""
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:
        found = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128.0) / 128.0
    elif width == 3:
        triples = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(triples), 4), np.uint8)
        wide[:, 1:] = triples
        found = wide.view("<i4")[:, 0].astype(np.float32) / 2.0**31
    else:
        found = np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2.0 ** (8 * width - 1)
    return found.reshape(-1, channels)


class Resampler:
    """Brings samples to another rate, piece by piece, by a windowed sinc that leaves out what the
    lower rate cannot hold."""

    def __init__(self, old: int, new: int) -> None:
        factor = math.gcd(old, new)
        self._up, self._down = new // factor, old // factor
        self._cutoff = min(1.0, new / old)
        self._reach = math.ceil(_TAPS / self._cutoff)
        self._held = np.zeros(self._reach, np.float32)
        self._begin = -self._reach
        """The place of the first of `_held` among all samples."""
        self._next = 0
        """The place of the next sample that is made."""
        starts = range(0, self._up, _PIECE)
        phases = [np.arange(begin, min(begin + _PIECE, self._up)) for begin in starts]
        # Made once: at odd rates each piece of samples has all phases, up to 16000 of 768 weights.
        self._table = np.concatenate([self._taps(some) for some in phases])

    def feed(self, samples: F32) -> F32:
        """Returns the samples that can be made by now."""
        if self._up == self._down:
            return samples
        up, reach = self._up, self._reach
        held = np.concatenate([self._held, samples])
        stop = max(self._next, -(-(self._begin + held.size - reach) * up // self._down))
        out = np.empty(stop - self._next, np.float32)
        for begin in range(self._next, stop, _PIECE):
            at = np.arange(begin, min(begin + _PIECE, stop), dtype=np.int64) * self._down
            windows = np.lib.stride_tricks.sliding_window_view(held, 2 * reach)
            rows = windows[at // up - reach + 1 - self._begin]
            first = begin - self._next
            out[first : first + len(at)] = (rows * self._table[at % up]).sum(axis=1)
        self._next = stop
        begin = max(self._begin, stop * self._down // up - reach + 1)
        self._held, self._begin = held[begin - self._begin :].copy(), begin
        return out

    def rest(self) -> F32:
        """Returns the last samples: silence follows."""
        return self.feed(np.zeros(0 if self._up == self._down else self._reach, np.float32))

    def _taps(self, phases: NDArray[np.int64]) -> F32:
        """(phases, 2 * reach) weights of the samples around each place."""
        distance = np.arange(1 - self._reach, self._reach + 1) - (phases / self._up)[:, None]
        window = 0.5 + 0.5 * np.cos(np.clip(np.pi * distance / self._reach, -np.pi, np.pi))
        taps = self._cutoff * np.sinc(self._cutoff * distance) * window
        found: F32 = taps.astype(np.float32)
        return found
