"""Videos as models see them: some of their frames, two of them in a patch, each pair of frames with
its time in the prompt. A pair is an image to the core."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_core.records import Record

from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import Fit, image_input, patches_of, positive, resized
from vllmx_engine.images.whole import QwenImages, check_ratio, smart_size
from vllmx_engine.wire.images import Kind, Pixels, PreparedImage
from vllmx_engine.wire.messages import ImageInput

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that yields behind each slice, and returns its result."""
_FORMATS = "mov,mp4,matroska,webm,avi"
_OPTIONS = {
    "format_whitelist": _FORMATS,
    "protocol_whitelist": "pipe",
    "enable_drefs": "0",
    "max_streams": "32",
}
"""A file must not name others. Opening it may decode a frame of each stream."""
_MOST_FRAMES_S = 240
"""Frames of a second in a video that is read."""
_MOST_PIXELS = 40_000_000_000
"""Pixels of all frames together: 10 minutes of 1080p at 30 frames a second. One thread decodes
them in about a minute (H.264, 760 million pixels a second)."""
_PACKETS_OF_SLICE = 256
_FPS = 24.0
"""Frames of a second where the file does not tell."""


class VideoFit(Record):
    """The frames that are taken of a video, and the tokens that they take."""

    data: bytes
    numbers: list[int]
    """The frames, ascending. The last one may be there twice."""
    seconds: list[float]
    """The time of each pair."""
    pair: Fit

    @property
    def runs(self) -> list[int]:
        """Tokens that follow each other in the prompt, pair by pair."""
        return self.pair.runs * len(self.seconds)

    @property
    def num_tokens(self) -> int:
        return sum(self.runs)

    @property
    def num_bytes(self) -> int:
        """Bytes of its patches."""
        return self.pair.num_bytes * len(self.seconds)


class VideoProcessor(QwenImages):
    """Qwen3-VL. See `ImageProcessor` for the members that it shares with images."""

    kind: Kind = "video"
    token = "<|video_pad|>"  # noqa: S105 - of a vocabulary
    around = ("<|vision_start|>", "<|vision_end|>")
    mark = token.join(around)

    def __init__(self, config: Mapping[str, Any]) -> None:
        size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
        means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        super().__init__({"patch_size": 16, "size": size, **means, **config})
        self._fps = float(config.get("fps") or 2)
        self._fewest = positive(config, "min_frames", 4)
        self._most = positive(config, "max_frames", 768)
        if config.get("cap_pixels_per_frame"):
            raise ValueError("a cap of pixels per frame")
        if not self._fewest <= self._most or not 0 < self._fps <= _MOST_FRAMES_S:
            raise ValueError("a number of frames")

    def measure(self, data: bytes, limits: ImageLimits, where: str) -> Slices[VideoFit]:
        """Reads headers and counts frames, without decoding any. Raises InvalidRequestError."""
        limits.check_bytes(len(data), where)
        with _opened(data, limits, where) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or _FPS)
            most = int(limits.max_seconds * min(rate, _MOST_FRAMES_S))
            height, width = stream.height, stream.width
            total = decoded = 0
            for number, packet in enumerate(container.demux(), 1):  # other streams take time too
                if packet.stream.index == stream.index:
                    decoded += packet.size > 0
                    # An edit list drops frames that others need to be decoded.
                    total += packet.size > 0 and not packet.is_discard
                if total > most:
                    raise InvalidRequestError(
                        f"{where} is a video of more than {limits.max_seconds:g} s: cut it, or"
                        " raise --max-video-seconds",
                        param=where,
                    )
                _check_work(decoded * height * width, where, decoded, height, width)
                if number % _PACKETS_OF_SLICE == 0:
                    yield
        yield
        if not total or not height or not width:
            raise _unreadable(where)
        count = min(max(int(total / rate * self._fps), self._fewest), self._most, total)
        numbers = np.linspace(0, total - 1, count).round().astype(int).tolist()
        numbers += numbers[-1:] * (-count % self.frames)
        times = np.array(numbers).reshape(-1, self.frames)[:, [0, -1]].mean(axis=1) / rate
        pair = self._fit_of(*self._sides(count, height, width, where))
        return VideoFit(data, numbers, times.tolist(), pair)

    def _sides(self, count: int, height: int, width: int, where: str) -> tuple[int, int]:
        """(height, width) that so many frames are resized to."""
        factor = self.patch * self.merge
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_ratio(height, width, where)
        counted = max(1, round(count / self.frames)) * self.frames
        return smart_size(height, width, factor, self.min_pixels, self.max_pixels, (count, counted))

    def written(self, fit: Any) -> str:
        """See `ImageProcessor`."""
        pads = (self.token * fit.runs[0]).join(self.around)
        return "".join(f"<{second:.1f} seconds>{pads}" for second in fit.seconds)

    def inputs(self, fit: VideoFit, limits: ImageLimits, where: str) -> Slices[list[ImageInput]]:
        """The pairs of frames, decoded now, each as if its first token were at 0. Raises
        InvalidRequestError."""
        found: list[ImageInput] = []
        pair: list[Pixels] = []
        for pixels in self._decoded(fit, limits, where):
            if pixels is not None:
                pair.append(resized(pixels, fit.pair.height, fit.pair.width, self._resample))
            if len(pair) == self.frames:
                found.append(image_input(0, self._paired(pair, fit.pair)))
                pair = []
            yield
        if len(found) < len(fit.seconds):
            raise _unreadable(where)
        return found

    def _paired(self, frames: list[Pixels], fit: Fit) -> PreparedImage:
        """Patches of several frames: those of each one lie side by side within a colour."""
        size = self.patch**2
        each = [
            patches_of(one, self.patch, self.merge, 1).reshape(-1, 3, 1, size) for one in frames
        ]
        patches = np.concatenate(each, axis=2).reshape(len(each[0]), -1)
        return PreparedImage.of(patches, self._levels, fit.grid, fit.num_tokens)

    def _decoded(self, fit: VideoFit, limits: ImageLimits, where: str) -> Iterator[Pixels | None]:
        """The wanted frames in order, None behind each packet. A video with fewer frames than
        packets repeats its last one."""
        wanted, index, pixels, count = list(reversed(fit.numbers)), 0, 0, 0
        last: VideoFrame | None = None
        with _opened(fit.data, limits, where) as container:
            stream = container.streams.video[0]
            for packet in container.demux():
                if packet.stream.index != stream.index:
                    yield None
                    continue
                count += packet.size > 0
                for last in stream.decode(packet):
                    _check_frame(last.width * last.height, limits, where)
                    while wanted and wanted[-1] == index:
                        wanted.pop()
                        yield _pixels(last)
                    index += 1
                if not wanted:
                    return
                # The size may change between frames.
                context = stream.codec_context
                pixels += context.width * context.height * (packet.size > 0)
                _check_work(pixels, where, count, context.height, context.width)
                yield None
            if last is not None:
                yield from (_pixels(last) for _ in wanted)


def _pixels(frame: VideoFrame) -> Pixels:
    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)


@contextmanager
def _opened(data: bytes, limits: ImageLimits, where: str) -> Iterator[InputContainer]:
    """The file with its headers read. Errors inside the block become InvalidRequestError."""
    try:
        import av  # an extra
    except ImportError:
        raise InvalidRequestError(
            f"{where} is a video, which needs av: pip install 'vllmx[video]'", param=where
        ) from None
    try:
        most = {"max_pixels": str(2 * limits.max_pixels)}  # of padded rows
        with closing(av.open(io.BytesIO(data), "r", options=_OPTIONS | most)) as container:
            context = container.streams.video[0].codec_context
            context.options = most
            context.thread_count = 1
            _check_frame(context.width * context.height, limits, where)
            yield container
    except VllmxError:
        raise
    except Exception:  # decoders raise anything on damaged files
        raise _unreadable(where) from None


def _unreadable(where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is no video that can be read here: send MP4, WebM, MKV or AVI", param=where
    )


def _check_frame(pixels: int, limits: ImageLimits, where: str) -> None:
    if pixels > limits.max_pixels:
        raise InvalidRequestError(
            f"{where} is a video with frames of more than {limits.max_pixels} pixels: send a"
            " smaller one, or raise --max-image-pixels",
            param=where,
        )


def _check_work(pixels: int, where: str, count: int, height: int, width: int) -> None:
    """`pixels`: those of the first `count` frames together, the last one of this size."""
    if pixels > _MOST_PIXELS:
        raise InvalidRequestError(
            f"{where} is a video of {count} or more frames of {width} x {height} pixels, at most"
            f" {_MOST_PIXELS} pixels are decoded: send fewer frames, or a smaller picture",
            param=where,
        )
