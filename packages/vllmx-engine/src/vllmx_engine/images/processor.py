"""Images as the models were trained on them: resized, normalised, cut into patches.

What comes out equals transformers' processors on Pillow, bit by bit: resizing is Pillow's own, and
a level of grey stands for the float that rescaling and normalising it in turn would give. Patches
stay levels until they are in the core: a quarter of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.text.model_files import read_json_object
from vllmx_engine.wire.images import Kind, Pixels, PreparedImage

_MAX_RATIO = 200
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers, which configs use too


class Fit(Record):
    """The patches and tokens for an image size."""

    height: int
    width: int
    """The size in pixels that the image is resized to."""
    grid: tuple[int, int, int]
    """The grid of patches, see `PreparedImage`."""
    num_tokens: int
    """Tokens of all pieces together."""
    num_bytes: int
    """Bytes of its patches."""
    pieces: tuple[int, int] | None = None
    """Rows and columns of the pieces that it is cut into, each of such a grid. The whole image, at
    the size of a piece, follows them."""

    @property
    def runs(self) -> list[int]:
        """Tokens that follow each other in the prompt, piece by piece."""
        count = 1 if self.pieces is None else self.pieces[0] * self.pieces[1] + 1
        return [self.num_tokens // count] * count


class ImageProcessor:
    """A model's preparation of images, and their tokens in prompts."""

    kind: Kind = "image"
    mark: str
    """The text that the chat template writes for an image."""
    token: str
    """The token that the prompt holds once for each of an image's features."""
    around = ("", "")
    """The texts before and behind the tokens of an image."""
    patch: int
    merge: int
    """Neighbouring patches along each side that make one token."""
    frames = 1
    _resample: int
    _levels: F32

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """(height, width) that an image is resized to. Raises InvalidRequestError for one that the
        model cannot see."""
        raise NotImplementedError

    def written(self, fit: Fit) -> str:
        """The text that replaces `mark`."""
        return (self.token * fit.num_tokens).join(self.around)

    def fit(self, height: int, width: int, where: str) -> Fit:
        """The fit for an image of this size, without its pixels. Raises as `size`."""
        return self._fit_of(*self.size(height, width, where))

    def _fit_of(self, tall: int, wide: int) -> Fit:
        """The fit for a size that patches fill."""
        grid = (1, tall // self.patch, wide // self.patch)
        num_patches = grid[1] * grid[2]
        num_bytes = num_patches * self.patch**2 * 3 * self.frames
        return Fit(tall, wide, grid, num_patches // self.merge**2, num_bytes)

    def prepare(self, image: Pixels, fit: Fit) -> list[PreparedImage]:
        """Prepares the pieces of an image with the `fit` for its size."""
        return [self._patched(resized(image, fit.height, fit.width, self._resample), fit)]

    def _patched(self, pixels: Pixels, fit: Fit) -> PreparedImage:
        patches = patches_of(pixels, self.patch, self.merge, self.frames)
        return PreparedImage.of(patches, self._levels, fit.grid, fit.runs[0])


def find_processor(folder: Path) -> ImageProcessor | None:
    """The processor that a model folder describes; None where it has none.

    Raises ConfigError for one that is damaged or not known.
    """
    config, name = read_json_object(folder / "preprocessor_config.json"), "preprocessor_config.json"
    if not config:
        name = "processor_config.json"
        config = read_json_object(folder / name).get("image_processor") or {}
    if not isinstance(config, Mapping) or not config:
        return None
    return processor_of({**_of_tower(folder), **config}, str(folder / name))


def _of_tower(folder: Path) -> dict[str, Any]:
    """Sizes that processors share with the tower, which some files of processors leave out."""
    model = read_json_object(folder / "config.json")
    vision = model.get("vision_config")
    patch = vision.get("patch_size") if isinstance(vision, Mapping) else None
    return {"patch_size": patch, "scale_factor": model.get("scale_factor")}


def processor_of(config: Mapping[str, Any], place: str) -> ImageProcessor:
    """The processor that a preprocessor_config.json describes. Raises ConfigError for one that is
    damaged or not known."""
    kind = str(config.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    make = _KINDS.get(kind)
    if make is None:
        raise ConfigError(
            f"{place} names the image processor {shown(kind)}, which is not known here;"
            f" known: {', '.join(_KINDS)}"
        )
    try:
        return make(config)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{place} describes no image processor that can be used"
            f" ({type(error).__name__}): download the file again"
        ) from error


def levels_of(config: Mapping[str, Any]) -> F32:
    """(3, 256) the float of each level of grey, by a processor's config."""
    levels = np.arange(256).astype(np.float64)
    if config.get("do_rescale", True):
        levels = levels * float(config.get("rescale_factor", 1 / 255))
    table: F32 = np.tile(levels.astype(np.float32), (3, 1))  # (3, 256)
    if config.get("do_normalize", True):
        means = np.array(config["image_mean"], np.float32)
        stds = np.array(config["image_std"], np.float32)
        if means.shape != (3,) or stds.shape != (3,) or not stds.all():
            raise ValueError("a mean and a deviation for each of three colours")
        table = (table - means[:, None]) / stds[:, None]
    return table


def resized(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """The image at another size, as Pillow resamples it."""
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((width, height), resample))


def patches_of(image: Pixels, patch: int, merge: int, frames: int) -> Pixels:
    """(N, 3 * frames * patch * patch) of (H, W, 3): merge x merge neighbours lie together, and one
    picture stands for all `frames`."""
    height, width, colours = image.shape
    tall, wide = height // patch // merge, width // patch // merge
    cut = image[: tall * merge * patch, : wide * merge * patch]
    cut = cut.reshape(tall, merge, patch, wide, merge, patch, colours)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)  # (tall, wide, merge, merge, 3, patch, patch)
    cut = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], frames, patch, patch))
    return np.ascontiguousarray(cut.reshape(tall * wide * merge * merge, -1))


# --- Qwen -----------------------------------------------------------------------------------------
class QwenImages(ImageProcessor):
    """Qwen2-VL and its successors: images keep their shape, and their size decides the number of
    patches."""

    mark = token = "<|image_pad|>"  # noqa: S105 - of a vocabulary

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = _positive(config, "patch_size", 14)
        self.merge = _positive(config, "merge_size", 2)
        self.frames = _positive(config, "temporal_patch_size", 2)
        size = config.get("size") or {}
        least, most = size.get("shortest_edge", 56 * 56), size.get("longest_edge", 28 * 28 * 1280)
        self.min_pixels = int(config.get("min_pixels") or least)
        self.max_pixels = int(config.get("max_pixels") or most)
        if not 0 < self.min_pixels <= self.max_pixels or not config.get("do_resize", True):
            raise ValueError("a range of pixels to resize to")
        self._resample = int(config.get("resample", _BICUBIC))
        self._levels = levels_of({"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidRequestError(
                f"{where} is an image of {width} x {height} pixels: one side may be at most"
                f" {_MAX_RATIO} times the other",
                param=where,
            )
        factor = self.patch * self.merge
        return smart_size(height, width, factor, self.min_pixels, self.max_pixels)


def smart_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width), both multiples of `factor`, of `least` to `most` pixels where that can be,
    in nearly the same shape."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < least:
        grow = math.sqrt(least / (height * width))
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
        self.patch = _positive(config, "patch_size", 14)
        self.num_tokens = _positive(config, "image_seq_length", 256)
        side, tokens = self.height // self.patch, math.isqrt(self.num_tokens)
        square = self.height == self.width and tokens**2 == self.num_tokens and side % tokens == 0
        if side < tokens or not square or config.get("do_pan_and_scan"):
            raise ValueError("one square")
        self.merge = side // tokens
        self._resample = int(config.get("resample", _BILINEAR))
        self._levels = levels_of({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **config})

    def size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.height, self.width


class Gemma4Images(ImageProcessor):
    """Gemma 4: images keep their shape, as large as so many tokens allow."""

    mark = token = "<|image|>"  # noqa: S105 - of a vocabulary
    around = ("<|image>", "<image|>")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = _positive(config, "patch_size", 16)
        self.merge = _positive(config, "pooling_kernel_size", 3)
        self.max_tokens = _positive(config, "max_soft_tokens", 280)
        if not config.get("do_resize", True):
            raise ValueError("a number of tokens to resize to")
        self._resample = int(config.get("resample", _BICUBIC))
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


# --- Idefics3 -------------------------------------------------------------------------------------
class IdeficsImages(ImageProcessor):
    """Idefics3 and SmolVLM: an image is cut into squares, all of one size."""

    mark = token = "<image>"  # noqa: S105 - of a vocabulary
    around = ("<fake_token_around_image><global-img>", "<fake_token_around_image>")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.patch = _positive(config, "patch_size", 32)
        self.merge = _positive(config, "scale_factor", 2)
        self._longest = _positive(config.get("size") or {}, "longest_edge", 4 * 364)
        self._side = _positive(config.get("max_image_size") or {}, "longest_edge", 364)
        if self._side < self.patch * self.merge or not config.get("do_resize", True):
            raise ValueError("squares of whole tokens")
        self._splits = bool(config.get("do_image_splitting", True))
        self._resample = int(config.get("resample", _LANCZOS))
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
        rows, columns = fit.pieces
        cut = whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        small = resized(whole, side, side, self._resample)
        return [self._patched(one, fit) for one in (*cut, small)]


_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_KINDS: dict[str, Callable[[Mapping[str, Any]], ImageProcessor]] = {
    "Qwen2VLImageProcessor": QwenImages,
    "Gemma3ImageProcessor": GemmaImages,
    "Gemma4ImageProcessor": Gemma4Images,
    "Idefics3ImageProcessor": IdeficsImages,
    "SmolVLMImageProcessor": IdeficsImages,
}


def _positive(config: Mapping[str, Any], name: str, default: int) -> int:
    value = int(config.get(name) or default)
    if not 0 < value <= 1 << 12:
        raise ValueError(name)
    return value
