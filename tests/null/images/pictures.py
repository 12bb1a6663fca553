"""Small images for tests, made by Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """One of noise, so that each pixel counts."""
    bands = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, bands), np.uint8)
    return Image.fromarray(pixels[:, :, 0] if bands == 1 else pixels, mode)


def stored(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
