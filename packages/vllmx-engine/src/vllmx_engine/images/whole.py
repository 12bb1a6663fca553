"""Images that a model sees whole, at a size of its own or at one fixed size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import F32

from vllmx_engine.images.processor import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    Fit,
    ImageProcessor,
    levels_of,
    positive,
    resampling,
    resized,
)
from vllmx_engine.wire.images import Pixels, PreparedImage

_MAX_RATIO = 200


class QwenImages(ImageProcessor):
    """Qwen2-VL and its successors: images keep their shape, and their size decides the number of
    patches."""

    mark = token = "<|image_pad|>"  # noqa: S105 - of a vocabulary

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = positive(config, "patch_size", 14)
        self.merge = positive(config, "merge_size", 2)
        self.frames = positive(config, "temporal_patch_size", 2)
        size = config.get("size") or {}
        least, most = size.get("shortest_edge", 56 * 56), size.get("longest_edge", 28 * 28 * 1280)
        self.min_pixels = int(config.get("min_pixels") or least)
        self.max_pixels = int(config.get("max_pixels") or most)
        if not 0 < self.min_pixels <= self.max_pixels or not config.get("do_resize", True):
            raise ValueError("a range of pixels to resize to")
        self._resample = resampling(config, BICUBIC)
        self._levels = levels_of({"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        check_ratio(height, width, where)
        factor = self.patch * self.merge
        return smart_size(height, width, factor, self.min_pixels, self.max_pixels)


class GlmImages(QwenImages):
    """GLM-4.1V: bounds on pixels are those of all frames, and a side holds at least one token."""

    mark = token = "<|image|>"  # noqa: S105 - of a vocabulary

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"size": {"shortest_edge": 12544, "longest_edge": 11760000}, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        check_ratio(height, width, where)
        factor = self.patch * self.merge
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        least, most = self.min_pixels / self.frames, self.max_pixels / self.frames
        return smart_size(height, width, factor, least, most)


def smart_size(
    height: int,
    width: int,
    factor: int,
    least: float,
    most: float,
    frames: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """(height, width), both multiples of `factor`, of `least` to `most` pixels where that can be,
    in nearly the same shape. `frames`: of a video, and as many rounded to whole patches."""
    count, counted = frames
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide * counted > most:
        shrink = math.sqrt(count * height * width / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide * counted < least:
        grow = math.sqrt(least / (count * height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide


# --- Gemma ----------------------------------------------------------------------------------------
class GemmaImages(ImageProcessor):
    """Gemma 3: each image becomes a square of one size and a fixed number of tokens. Large images
    are not cut into additional pieces."""

    mark = "<start_of_image>"
    token = "<image_soft_token>"  # noqa: S105 - of a vocabulary
    around = ("\n\n<start_of_image>", "<end_of_image>\n\n")

    def __init__(self, config: Mapping[str, Any]) -> None:
        size = config.get("size") or {}
        self.height, self.width = int(size.get("height", 224)), int(size.get("width", 224))
        self.patch = positive(config, "patch_size", 14)
        self.num_tokens = positive(config, "image_seq_length", 256)
        side, tokens = self.height // self.patch, math.isqrt(self.num_tokens)
        square = self.height == self.width and tokens**2 == self.num_tokens and side % tokens == 0
        if side < tokens or not square or config.get("do_pan_and_scan"):
            raise ValueError("one square")
        self.merge = side // tokens
        self._resample = resampling(config, BILINEAR)
        self._levels = levels_of({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.height, self.width


class Gemma4Images(ImageProcessor):
    """Gemma 4: images keep their shape, as large as so many tokens allow."""

    mark = token = "<|image|>"  # noqa: S105 - of a vocabulary
    around = ("<|image>", "<image|>")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = positive(config, "patch_size", 16)
        self.merge = positive(config, "pooling_kernel_size", 3)
        self.max_tokens = positive(config, "max_soft_tokens", 280)
        if not config.get("do_resize", True):
            raise ValueError("a number of tokens to resize to")
        self._resample = resampling(config, BICUBIC)
        levels = levels_of({"do_normalize": False, **config})
        self._levels: F32 = 2 * (levels - np.float32(0.5))  # by the model, in the original

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Whole tokens, in nearly the same shape and as large as allowed."""
        side = self.merge * self.patch
        factor = math.sqrt(self.max_tokens * side**2 / (height * width))
        tall, wide = (math.floor(factor * size / side) * side for size in (height, width))
        most = self.max_tokens * side
        if not tall and not wide:
            raise InvalidRequestError(f"{where} is an image that no token holds", param=where)
        if not tall:
            tall, wide = side, min(width // height * side, most)
        elif not wide:
            tall, wide = min(height // width * side, most), side
        return tall, wide


# --- Pixtral --------------------------------------------------------------------------------------
class PixtralImages(ImageProcessor):
    """Pixtral and Mistral 3: images keep their shape, and the prompt has a token behind each line
    of tokens."""

    mark = token = "[IMG]"  # noqa: S105 - of a vocabulary
    line_break, _end = "[IMG_BREAK]", "[IMG_END]"

    def __init__(self, config: Mapping[str, Any]) -> None:
        patch, size = config.get("patch_size"), config.get("size") or {}
        if isinstance(patch, Mapping):
            config = {**config, "patch_size": patch.get("height")}
        self.patch = positive(config, "patch_size", 16)
        self.merge = positive(config, "spatial_merge_size", 1)
        self._longest = positive(size, "longest_edge", 1024)
        square = not isinstance(patch, Mapping) or patch.get("width") == self.patch
        if not square or "height" in size or not config.get("do_resize", True):
            raise ValueError("square patches and a longest edge")
        self._resample = resampling(config, BICUBIC)
        self._levels = levels_of({"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        ratio = max(height, width) / self._longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise InvalidRequestError(
                f"{where} is an image with one side more than {self._longest} times the other: send"
                " a part of it",
                param=where,
            )
        factor = self.patch * self.merge
        return -(-height // factor) * factor, -(-width // factor) * factor

    def _fit_of(self, tall: int, wide: int) -> Fit:
        found = super()._fit_of(tall, wide)
        breaks = found.grid[1] // self.merge - 1 if self.line_break else 0
        return replace(found, num_tokens=found.num_tokens + breaks)

    def written(self, fit: Fit) -> str:
        """See `ImageProcessor`."""
        lines = [self.token * (fit.grid[2] // self.merge)] * (fit.grid[1] // self.merge)
        return self.line_break.join(lines) + self._end


class LightOnImages(PixtralImages):
    """LightOnOCR: the same without tokens between lines. A size holds whole tokens, also where the
    file names the patch of the tower, for which transformers leaves a rest out."""

    mark = token = "<|image_pad|>"  # noqa: S105 - of a vocabulary
    line_break = _end = ""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.patch = positive(config, "tower_patch_size", self.patch)


# --- LLaVA ----------------------------------------------------------------------------------------
class SiglipImages(ImageProcessor):
    """SigLIP before LLaVA: an image is stretched to a square, and a token is one patch."""

    mark = token = "<image>"  # noqa: S105 - of a vocabulary
    merge = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        size = config.get("size") or {}
        self._read(size, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **config})

    def _read(self, size: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Reads what all have; `size`: the square's."""
        self.patch = positive(config, "patch_size", 14)
        self._side = positive(size, "height", 224)
        square = self._side == positive(size, "width", 224) and self._side % self.patch == 0
        if not square or config.get("do_pad") or not config.get("do_resize", True):
            raise ValueError("one square")
        self._resample = resampling(config, BICUBIC)
        self._levels = levels_of(config)

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self._side, self._side


class ClipImages(SiglipImages):
    """CLIP before LLaVA: the shorter edge of an image is resized, and the middle is taken."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        size, crop = config.get("size") or {}, config.get("crop_size") or {}
        if isinstance(crop, int):
            crop = {"height": crop, "width": crop}
        if isinstance(size, int):
            size = {"shortest_edge": size}
        self._read(crop, {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **config})
        self._shortest = positive(size, "shortest_edge", 224)
        if self._side > self._shortest or not config.get("do_center_crop", True):
            raise ValueError("a square within the image")

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        check_ratio(height, width, where)
        return super().size(height, width, where)

    def prepare(self, image: Pixels, fit: Fit) -> list[PreparedImage]:
        """See `ImageProcessor`."""
        height, width = image.shape[:2]
        longest = int(self._shortest * max(height, width) / min(height, width))
        tall, wide = (self._shortest, longest) if height <= width else (longest, self._shortest)
        found = resized(image, tall, wide, self._resample)
        top, left = (tall - self._side) // 2, (wide - self._side) // 2
        return [self._patched(found[top : top + self._side, left : left + self._side], fit)]


def check_ratio(height: int, width: int, where: str) -> None:
    """Raises InvalidRequestError for an image or a video that is much longer in one direction. The
    error names no size: that of a small video is not the sent one."""
    ratio = max(width, height) / min(width, height)
    if ratio > _MAX_RATIO:
        raise InvalidRequestError(
            f"one side of {where} is {ratio:g} times the other, it may be at most {_MAX_RATIO}"
            " times: send a part of it",
            param=where,
        )
