"""Images that a model sees in pieces, all squares of one size, and as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllmx_engine.images.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    LANCZOS,
    Fit,
    ImageProcessor,
    levels_of,
    positive,
    resampling,
    resized,
)
from vllmx_engine.wire.images import Pixels, PreparedImage

_MAX_PIECES = 256
"""The most pieces of an image: models have about ten."""


class IdeficsImages(ImageProcessor):
    """Idefics3 and SmolVLM: an image is cut into squares, all of one size."""

    mark = token = "<image>"  # noqa: S105 - of a vocabulary
    around = ("<fake_token_around_image><global-img>", "<fake_token_around_image>")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = positive(config, "patch_size", 32)
        self.merge = positive(config, "scale_factor", 2)
        self._longest = positive(config.get("size") or {}, "longest_edge", 4 * 364)
        self._side = positive(config.get("max_image_size") or {}, "longest_edge", 364)
        if self._side < self.patch * self.merge or not config.get("do_resize", True):
            raise ValueError("squares of whole tokens")
        self._splits = bool(config.get("do_image_splitting", True))
        self._resample = resampling(config, LANCZOS)
        self._levels = levels_of({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **config})

    def written(self, fit: Fit) -> str:
        """See `ImageProcessor`: pieces are named by row and column."""
        tokens, (begin, end) = self.token * fit.runs[0], self.around
        rows, columns = fit.pieces or (0, 0)
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{end}<row_{row}_col_{column}>{tokens}"
            text += "\n"
        return f"{text}\n{begin}{tokens}{end}" if text else f"{begin}{tokens}{end}"

    def fit(self, height: int, width: int, where: str) -> Fit:
        """See `ImageProcessor`."""
        tall, wide = self._first_size(height, width)
        side, ratio = self._side, wide / tall
        if not self._splits:
            tall = wide = side
        elif wide >= tall:
            wide = math.ceil(wide / side) * side
            tall = math.ceil(int(wide / ratio) / side) * side
        else:
            tall = math.ceil(tall / side) * side
            wide = math.ceil(int(tall * ratio) / side) * side
        tall, wide = max(tall, side), max(wide, side)
        rows, columns = tall // side, wide // side
        count = rows * columns + 1 if rows * columns > 1 else 1
        one = self._fit_of(side, side)
        return Fit(
            tall, wide, one.grid, count * one.num_tokens, count * one.num_bytes,
            (rows, columns) if count > 1 else None,
        )  # fmt: skip

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """The size at which the longer edge is as long as the config says."""
        if width >= height:
            tall = int(self._longest / (width / height))
            return max(1, tall + tall % 2), self._longest
        wide = int(self._longest * (width / height))
        return self._longest, max(1, wide + wide % 2)

    def prepare(self, image: Pixels, fit: Fit) -> list[PreparedImage]:
        """See `ImageProcessor`."""
        first = resized(image, *self._first_size(*image.shape[:2]), self._resample)
        whole, side = resized(first, fit.height, fit.width, self._resample), self._side
        if fit.pieces is None:
            return [self._patched(whole, fit)]
        small = resized(whole, side, side, self._resample)
        return [self._patched(one, fit) for one in (*cut_up(whole, side), small)]


# --- InternVL -------------------------------------------------------------------------------------
class InternImages(ImageProcessor):
    """InternVL: an image is stretched to the rows and columns of squares whose shape is the nearest
    to its own, and the whole image to one square more."""

    mark = token = "<IMG_CONTEXT>"  # noqa: S105 - of a vocabulary
    around = ("<img>", "</img>")

    def __init__(self, config: Mapping[str, Any]) -> None:
        size = config.get("size") or {}
        self._side = positive(size, "height", 384)
        self.patch = positive(config, "patch_size", 14)
        self.merge = round(1 / float(config.get("downsample_ratio") or 0.5))
        least, most = positive(config, "min_patches", 1), positive(config, "max_patches", 12)
        if self._side != positive(size, "width", 384) or not config.get("do_resize", True):
            raise ValueError("squares")
        if self.merge < 1 or self._side % (self.patch * self.merge):
            raise ValueError("squares of whole tokens")
        if not least <= most <= _MAX_PIECES:
            raise ValueError(f"a number of pieces up to {_MAX_PIECES}")
        shapes = [
            (rows, columns)
            for columns in range(1, most + 1)
            for rows in range(1, most // columns + 1)
            if rows * columns >= least
        ]
        self._shapes = sorted(shapes, key=math.prod)
        self._resample = resampling(config, BICUBIC)
        self._levels = levels_of({"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **config})

    def fit(self, height: int, width: int, where: str) -> Fit:
        """See `ImageProcessor`."""
        rows, columns = self._shape(height, width)
        count = rows * columns + 1 if rows * columns > 1 else 1
        one, side = self._fit_of(self._side, self._side), self._side
        return Fit(
            rows * side, columns * side, one.grid, count * one.num_tokens, count * one.num_bytes,
            (rows, columns) if count > 1 else None,
        )  # fmt: skip

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns whose shape is nearest to the image's. Among equally near ones the
        largest is taken whose pieces have less than twice the image's pixels."""
        best, nearest, ratio = (1, 1), math.inf, width / height
        for rows, columns in self._shapes:
            off = abs(ratio - columns / rows)
            large = height * width > 0.5 * self._side**2 * rows * columns
            if off < nearest or (off == nearest and large):
                best, nearest = (rows, columns), off
        return best

    def prepare(self, image: Pixels, fit: Fit) -> list[PreparedImage]:
        """See `ImageProcessor`."""
        whole = resized(image, fit.height, fit.width, self._resample)
        if fit.pieces is None:
            return [self._patched(whole, fit)]
        small = resized(image, self._side, self._side, self._resample)
        return [self._patched(one, fit) for one in (*cut_up(whole, self._side), small)]


def cut_up(image: Pixels, side: int) -> Pixels:
    """(N, side, side, 3) squares of an image that they fill, row by row."""
    rows, columns = image.shape[0] // side, image.shape[1] // side
    found = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return found.reshape(-1, side, side, 3)
