"""Pillow is given no metadata: neither millions of pieces nor what they unfold to; what real images
bring changes no pixel."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.images.bare import bare
from vllmx_engine.images.decode import decode
from vllmx_engine.images.limits import ImageLimits

from .pictures import picture, stored

MANY = 70_000


def segment(marker: int, data: bytes = b"") -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def in_jpeg(pieces: bytes, **options: object) -> bytes:
    data = stored(picture(24, 16), "JPEG", **options)
    return data[:2] + pieces + data[2:]


def in_png(pieces: bytes, **options: object) -> bytes:
    data = stored(picture(24, 16), "PNG", **options)
    return data[:33] + pieces + data[33:]  # behind the header


def in_gif(pieces: bytes) -> bytes:
    data = stored(picture(24, 16, "L"), "GIF")
    palette = 13 + (3 << (data[10] & 7) + 1)
    return data[:palette] + pieces + data[palette:]


def tiff(orientation: int, *, order: str = "<", entries: bytes = b"", kind: int = 3) -> bytes:
    """EXIF's body: one tag behind others."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    count = len(entries) // 12 + 1
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *[orientation, 0][: 3 - kind // 2])
    tag = struct.pack(order + "HHI", 0x112, kind, 1) + value
    return head + struct.pack(order + "IH", 8, count) + entries + tag + bytes(4)


def as_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        seen = ImageOps.exif_transpose(image).convert("RGBA")
        ground = Image.new("RGB", seen.size, "white")
        ground.paste(seen, mask=seen)
        return np.asarray(ground)


def pixels(data: bytes) -> np.ndarray:
    return decode(data, ImageLimits(), "here")


def error(data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        pixels(data)
    assert caught.value.param == "here"
    return caught.value.message


# --- what is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (in_jpeg(segment(0xFE) * 5000), "4096 segments"),
        (in_jpeg(segment(0xE1, b"Exif\0\0" + bytes(100)) * 5000), "4096 segments"),
        (stored(picture(9, 9), "JPEG")[:-2] + segment(0xE0) * 5000, "4096 segments"),
        (in_png(chunk(b"tEXt", b"a") * MANY), "65536 chunks"),
        (in_png(chunk(b"IDAT") * MANY), "65536 chunks"),
        (in_gif(b"!\xfe" + b"\1a" * MANY + b"\0"), "65536 blocks"),
        (in_gif(b"!\xfe\0" * MANY), "65536 blocks"),
        (in_gif(b"\1" * MANY), "65536 blocks"),
    ],
    ids=["comments", "EXIF", "between scans", "texts", "data", "one comment", "comments", "none"],
)
def test_images_of_very_many_pieces(data: bytes, what: str) -> None:
    assert f"more than {what}" in error(data)
    assert "save it again, without metadata" in error(data)


@pytest.mark.parametrize(
    "table", [segment(0xDB, bytes([0, *[1] * 64]) * 1000), segment(0xC0, bytes(60_000))]
)
def test_jpegs_of_very_large_tables(table: bytes) -> None:
    assert "more than 65536 bytes of tables" in error(in_jpeg(table * 2))


# --- what Pillow does not see ---------------------------------------------------------------------
COMMENTS = b"!\xff\x0bNETSCAPE2.0\0" + b"!\1\0" + b"!\xfe" + b"\1a" * 100 + b"\0"
TABLES = struct.pack("<HHII", 0x8000, 5, 8000, 8)


@pytest.mark.parametrize(
    "data",
    [
        in_jpeg(segment(0xE5, b"x") + bytes(1 << 20)),
        in_jpeg(b"\xff" * (1 << 20)),
        in_jpeg(b"\xff\xd8" * (1 << 19)),
        in_jpeg(b"\xff\0" * (1 << 19)),
        in_jpeg(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000) * 20),
        in_png(chunk(b"zTXt", b"\0\0" + zlib.compress(bytes(1 << 20))) * 1000),
        in_png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20))) * 1000),
        in_png(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(9999))) * 1000),
        in_png(chunk(b"acTL", bytes(8)) + chunk(b"fcTL", bytes(26))),
        in_gif(COMMENTS * 100),
    ],
    ids=["junk", "fill", "starts", "zeros", "8BIM", "texts", "profiles", "EXIF", "frames", "GIF"],
)
def test_pillow_is_spared(data: bytes) -> None:
    assert len(bare(data, "here").data) < 3000
    assert pixels(data).shape == (16, 24, 3)


def test_tags_that_share_their_values_are_not_read() -> None:
    body = tiff(6, entries=b"".join(TABLES for _ in range(2000)))
    assert pixels(in_jpeg(segment(0xE1, b"Exif\0\0" + body + bytes(30_000)))).shape == (24, 16, 3)
    assert pixels(in_png(chunk(b"eXIf", body + bytes(1 << 20)))).shape == (24, 16, 3)


# --- what real images bring -----------------------------------------------------------------------
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


@pytest.mark.parametrize("number", range(10))
def test_orientations_are_those_of_pillow(number: int) -> None:
    exif, xmp = Image.Exif(), XMP % number
    exif[0x010F], exif[0x0112] = "a camera", number
    exif.get_ifd(0x8769)[0x9003] = "2026:01:01 00:00:00"
    image, text = picture(7, 4), PngInfo()
    raw = b"Exif\0\0" + tiff(number)
    text.add_text("Raw profile type exif", f"\nexif\n{len(raw):8}\n{raw.hex()}\n", zip=True)
    files = [stored(image, form, exif=exif) for form in ("JPEG", "PNG", "WEBP")]
    files += [stored(image, form, xmp=xmp) for form in ("JPEG", "WEBP")]
    marked = PngInfo()
    marked.add_itxt("XML:com.adobe.xmp", xmp.decode())
    files += [stored(image, "PNG", pnginfo=text), stored(image, "PNG", pnginfo=marked)]
    files += [in_jpeg(segment(0xE1, b"Exif\0\0" + tiff(number, order=">"))), stored(image, "GIF")]
    files += [in_png(chunk(b"eXIf", tiff(number, kind=4)))]
    for data in files:
        assert np.array_equal(pixels(data), as_pillow(data))


def photographs() -> dict[str, Callable[[], bytes]]:
    """As cameras and programs write them."""
    exif = Image.Exif()
    exif[0x0112] = 8
    profile, xmp = bytes(range(256)) * 1200, b"<x:xmpmeta/>" + b" " * 60_000
    large = picture(200, 120)
    said = {"exif": exif, "icc_profile": profile, "xmp": xmp, "comment": b"c" * 60_000}
    after = stored(picture(9, 9), "JPEG")
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\2")
    parts = segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000)) * 300
    return {
        "all metadata": lambda: stored(large, "JPEG", **said),
        "progressive, restarts": lambda: stored(
            large, "JPEG", progressive=True, restart_marker_blocks=1, quality=95, **said
        ),
        "a film behind it": lambda: stored(large, "JPEG", **said) + after * 50,
        "many large segments": lambda: in_jpeg(parts, quality=90),
        "CMYK": lambda: stored(picture(20, 10, "CMYK"), "JPEG"),
        "CMYK, transformed": lambda: (
            lambda data: data[:2] + adobe + data[2:]
        )(stored(picture(20, 10, "CMYK"), "JPEG")),
        "several pictures": lambda: stored(
            large, "MPO", save_all=True, append_images=[picture(200, 120, seed=1)]
        ),
        "a palette": lambda: stored(large.quantize(50), "PNG", transparency=3),
        "an animated PNG": lambda: stored(
            large, "PNG", save_all=True, append_images=[picture(200, 120, seed=1)]
        ),
        "transparent GIF": lambda: stored(
            large.quantize(50), "GIF", transparency=7, comment=b"c" * 1000, save_all=True,
            append_images=[picture(200, 120, seed=1).quantize(50)],
        ),
        "WebP": lambda: stored(large, "WEBP", exif=exif, icc_profile=profile, xmp=xmp),
    }  # fmt: skip


@pytest.mark.parametrize("kind", photographs())
def test_photographs_are_as_pillow_reads_them(kind: str) -> None:
    data = photographs()[kind]()
    assert np.array_equal(pixels(data), as_pillow(data))


def test_pixels_in_tiny_chunks() -> None:
    data = stored(picture(24, 16), "PNG")
    size = struct.unpack(">I", data[33:37])[0]
    parts = b"".join(chunk(b"IDAT", bytes([byte])) for byte in data[41 : 41 + size])
    cut = data[:33] + parts + data[45 + size :]
    assert np.array_equal(pixels(cut), as_pillow(data))


def outcome(data: bytes) -> str:
    try:
        return str(pixels(data).shape)
    except InvalidRequestError as refused:
        return refused.message


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WebP", "GIF"])
def test_images_that_end_anywhere(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if form == "GIF" else {"exif": exif}
    data = stored(picture(6, 5).quantize(16) if form == "GIF" else picture(6, 5), form, **options)
    whole, damaged = outcome(data), f"here is a damaged or truncated {form}: save it again"
    found = [outcome(data[:end]) for end in range(12, len(data))]
    assert set(found) <= {whole, damaged}
    assert set(found[: len(data) // 2]) == {damaged}
