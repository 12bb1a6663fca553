"""GGUF files byte by byte, valid or not."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B",
    U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, item: Any) -> bytes:
    """A value; an array is (kind of its items, items)."""
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        inner, items = item
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, i) for i in items)
    return struct.pack(FORMS[kind], item)


def entry(key: str, kind: int, item: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """`dims` as in the file: the fastest first."""
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def header(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    start = magic + struct.pack("<IQQ", version, *counts)
    return start + b"".join(entries) + b"".join(tensors)


def write(path: Path, head: bytes, data: bytes = b"", alignment: int = 32) -> Path:
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path
