"""Stored images to pixels, by Pillow, within bounds."""

from __future__ import annotations

import io

import numpy as np
from vllmx_core.errors import ConfigError, InvalidRequestError, VllmxError

from vllmx_engine.images.bare import bare, form_of, orientation
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.prepared import Pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's number of the transposition that turns an image of EXIF's orientation upright."""


def check_pillow() -> None:
    """Raises ConfigError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError("images need Pillow: pip install vllmx[vision]") from None


def decode(data: bytes, limits: ImageLimits, where: str) -> Pixels:
    """The image, or the first of an animation, upright and in RGB: grey values are repeated,
    transparency is dropped and CMYK converted, as transformers does it. Of 16 bits of grey the
    upper eight are taken, where Pillow alone would make all but the darkest white.

    Raises:
        InvalidRequestError: no image of a known format, a damaged one, or one of more pixels or
            pieces than allowed, which is seen before they are decoded.
    """
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
            _check_size(image.size, limits, where)
            image.load()
            turn = _UPRIGHT.get(orientation({**image.info, **stripped.info}))
            upright = image if turn is None else image.transpose(Image.Transpose(turn))
            if upright.mode.startswith("I;16"):
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return np.asarray(upright if upright.mode == "RGB" else upright.convert("RGB"))
    except VllmxError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(limits, where) from None
    except Exception:  # decoders raise anything on damaged files
        raise _unreadable(data, where) from None


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
