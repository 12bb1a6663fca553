"""Stored images to pixels, by Pillow, within bounds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllmx_core.errors import ConfigError, InvalidRequestError, VllmxError

from vllmx_engine.images.bare import bare, form_of, orientation
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.wire.images import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's number of the transposition that turns an image of EXIF's orientation upright."""
_SIDEWAYS = frozenset({2, 4, 5, 6})
"""The transpositions that swap height and width."""
_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_DEPTH = "bits of a value in the file"
"""Our own key in Pillow's `info`."""


def check_pillow() -> None:
    """Raises ConfigError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError("images need Pillow: pip install vllmx[vision]") from None


def size_of(data: bytes, limits: ImageLimits, where: str) -> tuple[int, int]:
    """(height, width) of the upright image, read from its header alone. Raises as `decode`, except
    for damage after the header."""
    with _opened(data, limits, where) as image:
        width, height = image.size
        return (width, height) if _turn_of(image) in _SIDEWAYS else (height, width)


def decode(data: bytes, limits: ImageLimits, where: str) -> Pixels:
    """The image, or the first of an animation, upright and in RGB: transparent ones are laid on
    white, grey values repeated and CMYK converted, as transformers does it. Of 16 bits of grey the
    upper eight are taken, where Pillow alone would make all but the darkest white.

    Raises:
        InvalidRequestError: no image of a known format, a damaged one, or one of more pixels or
            pieces than allowed, which is seen before they are decoded.
    """
    from PIL import Image

    with _opened(data, limits, where) as image:
        image.load()
        turn = _turn_of(image)
        flat = _on_white(image)
        return np.asarray(flat if turn is None else flat.transpose(Image.Transpose(turn)))


@contextmanager
def _opened(data: bytes, limits: ImageLimits, where: str) -> Iterator[ImageFile]:
    """The image with its header read. Errors inside the block become InvalidRequestError."""
    check_pillow()
    from PIL import (  # noqa: F401 - formats must be known, and `Image.open` would import all
        GifImagePlugin,
        Image,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )

    try:
        stripped = bare(data, where)
        with Image.open(io.BytesIO(stripped.data), formats=FORMATS) as image:
            image.info.update(stripped.info)
            if form_of(data) == "PNG":
                image.info[_DEPTH] = stripped.data[24]
            _check_size(image.size, limits, where)
            yield image
    except VllmxError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(limits, where) from None
    except Exception:  # decoders raise anything on damaged files
        raise _unreadable(data, where) from None


def _turn_of(image: ImageFile) -> int | None:
    return _UPRIGHT.get(orientation(image.info))


def _on_white(image: ImageFile) -> Image:
    """The image in RGB, with white for transparency."""
    from PIL import Image

    key = _transparent_value(image)
    if image.mode.startswith("I;16"):
        deep = np.asarray(image)
        grey = (deep >> 8).astype(np.uint8)
        if key is not None:
            grey[deep == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if key is not None:
        image.info["transparency"] = key
    if key is None and image.mode not in _WITH_ALPHA:
        return image if image.mode == "RGB" else image.convert("RGB")
    seen = image if image.mode == "RGBA" else image.convert("RGBA")
    ground = Image.new("RGB", image.size, (255, 255, 255))
    ground.paste(seen, mask=seen.getchannel("A"))
    return ground


def _transparent_value(image: ImageFile) -> Any:
    """The value of transparent pixels, scaled like the pixels: Pillow converts pixels of a PNG to 8
    bits, but not this value."""
    key, depth = image.info.get("transparency"), image.info.get(_DEPTH, 8)
    if image.mode == "L" and isinstance(key, int) and depth in (2, 4):
        return key * 255 // ((1 << depth) - 1)
    if image.mode == "RGB" and isinstance(key, tuple) and depth == 16:
        return tuple(level >> 8 for level in key)
    return key


def _check_size(size: tuple[int, int], limits: ImageLimits, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequestError(f"{where} is an image without pixels", param=where)
    if width * height > limits.max_pixels:
        raise _too_many_pixels(limits, where)


def _unreadable(data: bytes, where: str) -> InvalidRequestError:
    form, what = form_of(data), "no image that can be read here: send PNG, JPEG, WebP or GIF"
    if form is not None:
        what = f"a damaged or truncated {form}: save it again"
    elif not data:
        what = "an image of no bytes: send it again"
    return InvalidRequestError(f"{where} is {what}", param=where)


def _too_many_pixels(limits: ImageLimits, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is an image of more than {limits.max_pixels} pixels: send a smaller one, or raise"
        " --max-image-pixels",
        param=where,
    )
