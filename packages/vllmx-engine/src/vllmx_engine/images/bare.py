"""Stored images without their metadata.

Pillow reads metadata in Python, piece by piece, before anybody asks for it: a file of 20 MiB can
hold millions of empty pieces, or compressed ones that hold a thousand times their size. It is given
what pixels are made of alone; of the metadata only the orientation counts. WebP stays as it is: its
pieces are read in C, at once.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from vllmx_core.errors import InvalidRequestError
from vllmx_core.records import Record

_MAX_SEGMENTS = 4096
"""The most segments of a JPEG. Metadata of 20 MiB take 320 full ones (64 KiB), the tables of 100
scans some 500."""
_MAX_SCANS = 100
"""The most scans of a progressive JPEG, which has about ten: each may be a few bytes long and take
as long as the whole picture."""
_MAX_TABLES_BYTES = 1 << 16
"""The most bytes of tables before a JPEG's first scan: the standard's largest, and a frame, take
some 5 KiB."""
_MAX_PIECES = 1 << 16
"""The most chunks of a PNG, or blocks of a GIF before its picture: writers cut pixels into chunks
of 8 KiB and more, so that 20 MiB are 2,560, and metadata of a GIF into blocks of 255 bytes."""
_MAX_NOTES = 4
"""The most chunks of a PNG that may tell its orientation: one of each kind is usual."""
_STARTS = {
    b"\xff\xd8": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}
_PLAINLY = ", without metadata"


class Bare(Record):
    """An image as Pillow is to see it."""

    data: bytes
    info: Mapping[str, Any]
    """Chunks removed from it that may hold its orientation, under Pillow's names."""


def bare(data: bytes, where: str) -> Bare:
    """The image without metadata, as far as its format is known; damaged ones up to the damage.
    Raises InvalidRequestError for one in more pieces than images have."""
    form = form_of(data)
    if form == "JPEG":
        return _bare_jpeg(data, where)
    bare_data = {"PNG": _bare_png, "GIF": _bare_gif}.get(form or "")
    return Bare(data if bare_data is None else bare_data(data, where), {})


def form_of(data: bytes) -> str | None:
    """The format that a file begins like; None: no known one."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((form for start, form in _STARTS.items() if data.startswith(start)), None)


def _check(count: int, most: int, where: str, form: str, of: str, remedy: str = _PLAINLY) -> None:
    """Raises InvalidRequestError for an image of too many pieces."""
    if count > most:
        raise InvalidRequestError(
            f"{where} is a {form} of more than {most} {of}: save it again{remedy}", param=where
        )


# --- JPEG -----------------------------------------------------------------------------------------
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""One that begins a segment with a length, or ends the picture."""
_SCAN, _END, _JFIF, _EXIF, _ADOBE = 0xDA, 0xD9, 0xE0, 0xE1, 0xEE
_TABLES = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xE0)}) - {0xC8}
_XMP_NAME, _EXIF_NAME = b"http://ns.adobe.com/xap/1.0/\0", b"Exif\0\0"


def _segments(data: bytes, where: str) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each up to the end of the picture, behind which phones put previews
    and films."""
    at, count = 2, 0
    while (found := _MARKER.search(data, at)) is not None and found[0][1] != _END:
        start, count = found.start(), count + 1
        _check(count, _MAX_SEGMENTS, where, "JPEG", "segments")
        at = found.end() + max(2, int.from_bytes(data[start + 2 : start + 4], "big"))
        yield found[0][1], start, at


def _bare_jpeg(data: bytes, where: str) -> Bare:
    kept, exif, info = [data[:2]], [], {}
    scans = num_tables_bytes = 0
    for marker, start, end in _segments(data, where):
        if marker == _SCAN:
            if not scans:
                kept.append(data[start:])
            scans += 1
            _check(scans, _MAX_SCANS, where, "JPEG", "scans", "")
        elif scans:
            continue  # libjpeg reads what is between scans, and passes over metadata at once
        elif marker in _TABLES:
            num_tables_bytes += end - start
            _check(num_tables_bytes, _MAX_TABLES_BYTES, where, "JPEG", "bytes of tables", "")
            kept.append(data[start:end])
        elif (marker == _JFIF and data.startswith(b"JFIF", start + 4)) or (
            marker == _ADOBE and data.startswith(b"Adobe", start + 4)
        ):
            kept.append(data[start:end])  # they tell how colours are meant
        elif marker == _EXIF and data.startswith(_EXIF_NAME, start + 4):
            exif.append(data[start + 4 + len(_EXIF_NAME) : end])
        elif marker == _EXIF and data.startswith(_XMP_NAME, start + 4):
            info["xmp"] = data[start + 4 + len(_XMP_NAME) : end]
    if exif:
        info["exif"] = b"".join(exif)
    return Bare(b"".join(kept), info)


# --- PNG ------------------------------------------------------------------------------------------
_RAW_EXIF = "Raw profile type exif"
_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_NOTES = (
    b"eXIf",
    b"iTXtXML:com.adobe.xmp\0",
    b"tEXt" + _RAW_EXIF.encode(),
    b"zTXt" + _RAW_EXIF.encode(),
)


def _bare_png(data: bytes, where: str) -> bytes:
    """The chunks that pixels are made of: of an animation the image that is shown where animations
    are not. Intact notes move before the pixels, where reading the header finds them."""
    head, pixels, notes = [data[:8]], list[bytes](), list[bytes]()
    at, count, kind = 8, 0, b""
    while at + 8 <= len(data) and kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at)
        start, at, count = at, at + size + 12, count + 1
        _check(count, _MAX_PIECES, where, "PNG", "chunks")
        chunk = data[start:at]
        if kind in _PIXELS:
            (pixels if pixels or kind == b"IDAT" else head).append(chunk)
        elif chunk.startswith(_NOTES, 4) and len(notes) < _MAX_NOTES and _is_intact(chunk):
            notes.append(chunk)
    return b"".join([*head, *(notes if pixels else ()), *pixels])


def _is_intact(chunk: bytes) -> bool:
    return int.from_bytes(chunk[-4:], "big") == zlib.crc32(chunk[4:-4])


# --- GIF ------------------------------------------------------------------------------------------
_EXTENSION, _PICTURE, _TRAILER = b"!,;"
_CONTROL = b"!\xf9"


def _bare_gif(data: bytes, where: str) -> bytes:
    """All from the first picture on, with the extension that tells its transparent colour."""
    flags = data[10] if len(data) > 10 else 0
    head = at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control, count = b"", 0
    while at < len(data) and data[at] not in (_PICTURE, _TRAILER):
        start, count = at, count + 1
        at += 1
        if data[start] == _EXTENSION:
            at += 1
            while at < len(data) and data[at] and count <= _MAX_PIECES:
                at, count = at + 1 + data[at], count + 1
            at += 1
        _check(count, _MAX_PIECES, where, "GIF", "blocks before its picture")
        if data.startswith(_CONTROL, start):
            control = data[start:at]
    return data[:head] + control + data[at:]


# --- what metadata say ----------------------------------------------------------------------------
_ORIENTATION = 0x112
_INTEGERS = {3: "H", 4: "I"}
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(info: Mapping[Any, Any]) -> int:
    """EXIF's number for how an image lies, 1 for upright or unknown. `info`: as Pillow names it."""
    found = _in_exif(_exif_of(info))
    if found is None:
        text = info.get("xmp") or str(info.get("XML:com.adobe.xmp", "")).encode()
        said = _IN_XMP.search(text)
        found = int(said[1]) if said else None
    return found or 1


def _exif_of(info: Mapping[Any, Any]) -> bytes:
    """The TIFF header and what follows."""
    raw = info.get("exif")
    if raw is None:
        lines = str(info.get(_RAW_EXIF, "")).split("\n")[3:]
        try:
            raw = bytes.fromhex("".join(lines))
        except ValueError:
            return b""
    return bytes(raw).removeprefix(_EXIF_NAME).removeprefix(_EXIF_NAME)


def _in_exif(exif: bytes) -> int | None:
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        at = struct.unpack_from(order + "I", exif, 4)[0]
        for entry in range(struct.unpack_from(order + "H", exif, at)[0]):
            place = at + 2 + 12 * entry
            tag, kind, count = struct.unpack_from(order + "HHI", exif, place)
            if tag == _ORIENTATION:
                if kind not in _INTEGERS or count != 1:
                    return 1
                return int(struct.unpack_from(order + _INTEGERS[kind], exif, place + 8)[0])
    except struct.error:
        return None
    return None
