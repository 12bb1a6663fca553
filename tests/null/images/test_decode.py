"""Stored images become pixels, and what is none becomes a typed error."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.images.decode import decode, size_of
from vllmx_engine.images.limits import ImageLimits

from .pictures import picture, stored

LIMITS = ImageLimits(max_pixels=1 << 16)


def pixels(data: bytes) -> np.ndarray:
    found = decode(data, LIMITS, "here")
    assert found.dtype == np.uint8
    return found


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 95})],
)
def test_formats(form: str, options: dict[str, object]) -> None:
    image = Image.new("RGB", (9, 7), (255, 0, 0))
    found = pixels(stored(image, form, **options))
    assert found.shape == (7, 9, 3)
    assert np.abs(found.astype(int) - np.asarray(image)).max() <= (3 if form == "JPEG" else 0)


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True})])
def test_the_first_image_of_an_animation_is_taken(form: str, options: dict[str, object]) -> None:
    first, second = Image.new("RGB", (4, 4), (0, 0, 255)), Image.new("RGB", (4, 4), (9, 9, 9))
    data = stored(first, form, save_all=True, append_images=[second], **options)
    assert (pixels(data) == (0, 0, 255)).all()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_modes_are_converted(mode: str) -> None:
    image = picture(5, 4, mode)
    form = "TIFF" if mode == "CMYK" else "PNG"
    if mode == "CMYK":  # PNG has none
        data = stored(image, "JPEG", quality=100)
        assert pixels(data).shape == (4, 5, 3)
        return
    assert (pixels(stored(image, form)) == np.asarray(image.convert("RGB"))).all()


def test_sixteen_bits_of_grey_and_palettes() -> None:
    deep = np.arange(0, 1 << 16, 1 << 12, dtype=np.uint16).reshape(2, 8)
    wanted = (deep >> 8).astype(np.uint8)[:, :, None].repeat(3, axis=2)
    assert (pixels(stored(Image.fromarray(deep))) == wanted).all()
    few = Image.new("P", (4, 1))
    few.putpalette([9, 8, 7, 200, 100, 50])
    few.putdata([0, 1, 1, 0])
    found = pixels(stored(few, "PNG", transparency=1))
    assert found.tolist() == [[[9, 8, 7], [255, 255, 255], [255, 255, 255], [9, 8, 7]]]


# --- transparency ---------------------------------------------------------------------------------
def inked(mode: str) -> Image.Image:
    """Black ink on a transparent ground that is black below: one flat colour without alpha."""
    image = Image.new("RGBA", (6, 2), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 3, 2))
    return image.convert(mode)


WHITE_BESIDE_INK = [[[0] * 3] * 3 + [[255] * 3] * 3] * 2


@pytest.mark.parametrize(
    ("mode", "form", "options"),
    [
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True, "exact": True}),
        ("RGBA", "GIF", {}),
        ("PA", "PNG", {}),
    ],
)
def test_transparent_images_lie_on_white(mode: str, form: str, options: dict[str, object]) -> None:
    image = inked("RGBA").quantize() if mode == "PA" else inked(mode)
    assert pixels(stored(image, form, **options)).tolist() == WHITE_BESIDE_INK


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    found = pixels(stored(Image.new("RGBA", (1, 1), (255, 0, 0, 51))))
    assert found.tolist() == [[[255, 204, 204]]]


@pytest.mark.parametrize(
    ("bits", "colour", "row", "key", "wanted"),
    [
        (1, 0, b"\x40", b"\0\0", [255, 255, 255, 255]),
        (1, 0, b"\x40", b"\0\1", [0, 255, 0, 0]),
        (2, 0, b"\x1b", b"\0\1", [0, 255, 170, 255]),
        (4, 0, b"\x12\x3f", b"\0\2", [17, 255, 51, 255]),
        (8, 0, b"\1\2\3\4", b"\0\3", [1, 2, 255, 4]),
        (16, 0, b"\1\2\1\3\2\0\3\0", b"\1\3", [1, 255, 2, 3]),
        (8, 2, bytes([1] * 3 + [2] * 3 + [3] * 3 + [4] * 3), b"\0\2" * 3, [1, 255, 3, 4]),
        (16, 2, b"\1\0" * 3 + b"\2\0" * 3 + b"\3\0" * 3 + b"\4\0" * 3, b"\2\0" * 3,
         [1, 255, 3, 4]),
    ],
)  # fmt: skip
def test_a_transparent_value(
    bits: int, colour: int, row: bytes, key: bytes, wanted: list[int]
) -> None:
    """Of all depths, of which Pillow widens the pixels to 8 bits and this value not."""
    found = pixels(png(4, 1, bits, colour, b"\0" + row, (b"tRNS", key)))
    assert found[0, :, 0].tolist() == wanted


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("turn", [1, 6])
def test_sizes_are_read_from_headers(form: str, turn: int) -> None:
    """Also of files that end behind them."""
    exif = Image.Exif()
    exif[0x0112] = turn
    options = {} if form == "GIF" else {"exif": exif}
    data = stored(picture(64, 48), form, **options)
    found = size_of(data, LIMITS, "here")
    assert found == pixels(data).shape[:2]
    assert found == ((48, 64) if turn == 1 or form == "GIF" else (64, 48))
    if form in ("PNG", "JPEG"):
        assert size_of(data[: len(data) * 3 // 4], LIMITS, "here") == found


def test_an_orientation_behind_the_pixels() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = stored(picture(8, 3), exif=exif)
    at = data.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(data[at : at + 4], "big")
    moved = data[:at] + data[end:-12] + data[at:end] + data[-12:]
    assert moved != data
    assert size_of(moved, LIMITS, "here") == pixels(moved).shape[:2] == (8, 3)


def test_images_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert pixels(stored(picture(8, 3), "PNG", exif=exif)).shape == (8, 3, 3)


def error(data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, LIMITS, "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    return caught.value.message


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_images(form: str) -> None:
    data = stored(picture(64, 64), form)
    for part in (len(data) // 2, len(data) // 4, 20):
        assert "damaged or truncated" in error(data[:part])


@pytest.mark.parametrize("form", ["TIFF", "BMP", "ICO", "PPM", "JPEG2000", "PDF", "TGA"])
def test_other_formats(form: str) -> None:
    assert "no image that can be read here: send PNG, JPEG, WebP or GIF" in error(
        stored(picture(32, 32), form)
    )


@pytest.mark.parametrize("data", [b"\x00" * 100, b"<svg/>", b"RIFF" + bytes(4) + b"AVI " * 9])
def test_other_files(data: bytes) -> None:
    assert "no image that can be read here: send PNG, JPEG, WebP or GIF" in error(data)
    assert "an image of no bytes" in error(b"")


def png(
    width: int,
    height: int,
    bits: int = 8,
    colour: int = 2,
    rows: bytes = b"\0" * 1000,
    *more: tuple[bytes, bytes],
) -> bytes:
    """One that claims a size, with next to no data unless that is given."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(257, 256), (60_000, 60_000), (1 << 30, 1 << 30)])
def test_decompression_bombs_are_not_decoded(size: tuple[int, int]) -> None:
    assert "more than 65536 pixels" in error(png(*size))


def test_jpegs_of_many_scans_are_not_decoded() -> None:
    """A scan of a few bytes can take as long as the whole picture; what lies behind it is none."""
    data = stored(picture(40, 30), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    assert pixels(data[:-2] + last * 20 + data[-2:]).shape == (30, 40, 3)
    assert "more than 100 scans" in error(data[:-2] + last * 200 + data[-2:])
    assert pixels(data + last * 200).shape == (30, 40, 3)


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_images_without_pixels(size: tuple[int, int]) -> None:
    assert "damaged or truncated PNG" in error(png(*size))
