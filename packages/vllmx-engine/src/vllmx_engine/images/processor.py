"""Images as the models were trained on them: resized, normalised, cut into patches.

What comes out equals transformers' processors on Pillow, bit by bit: resizing is Pillow's own, and
a level of grey stands for the float that rescaling and normalising it in turn would give. Patches
stay levels until they are in the core: a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_engine.wire.images import Kind, Pixels, PreparedImage
from vllmx_engine.wire.messages import ImageInput

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers, which configs use too
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


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
    line_break = ""
    """The token behind each line of an image's tokens but the last; empty: there is none."""
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


def image_input(start: int, image: PreparedImage) -> ImageInput:
    """An image whose tokens begin at `start`, as it travels to the core."""
    return ImageInput(
        start,
        image.num_tokens,
        image.digest,
        image.grid,
        image.patches.tobytes(),
        image.levels.tobytes(),
    )


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
    if not np.isfinite(table).all():
        raise ValueError("levels that are not finite")
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


def positive(config: Mapping[str, Any], name: str, default: int) -> int:
    """A size or count of a config. Raises ValueError for one below 1 or above 4096."""
    given = config.get(name)
    value = default if given is None else int(given)
    if not 0 < value <= 1 << 12:
        raise ValueError(name)
    return value


def resampling(config: Mapping[str, Any], default: int) -> int:
    """Pillow's number of the filter of a config. Raises ValueError for one that Pillow has not."""
    value = int(config.get("resample", default))
    if not 0 <= value <= 5:
        raise ValueError("resample")
    return value
