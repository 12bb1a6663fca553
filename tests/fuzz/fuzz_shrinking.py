"""Fuzz target: a valid file of weights that somebody cuts while it is read.

An input is three numbers: the format, how many reads come before the cut, and what is left.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.weights.files import Bytes, WeightFile
from vllmx_core.weights.map import assemble

from . import fuzz_gguf, fuzz_safetensors
from .folders import folder_of, registry

_INPUT = struct.Struct("<BBI")
_NEVER = 255


def one_input(data: bytes) -> bool:
    """Whether the model was read to its end. Only errors made for users are expected."""
    if len(data) != _INPUT.size:
        return False
    kind, after, left = _INPUT.unpack(data)
    name = "model.safetensors" if kind % 2 else "model.gguf"
    whole = (fuzz_safetensors if kind % 2 else fuzz_gguf).seeds()[0]
    files = {"config.json": fuzz_safetensors.CONFIG_TEXT} if kind % 2 else {}
    with folder_of({**files, name: whole}) as folder:
        path = folder / name
        with _cut(path, after, min(left, len(whole))):
            try:
                _read_all(folder if kind % 2 else path)
            except VllmxError:
                return False
    return True


@contextmanager
def _cut(path: Path, after: int, left: int) -> Iterator[None]:
    original, begun = WeightFile.read, 0

    def read(self: WeightFile, begin: int, end: int, room: Bytes | None = None) -> Bytes:
        nonlocal begun
        if begun == after != _NEVER:
            os.truncate(path, left)
        begun += 1
        return original(self, begin, end, room)

    with mock.patch.object(WeightFile, "read", read):
        yield


def _read_all(path: Path) -> None:
    checkpoint = open_checkpoint(registry(), path)
    try:
        for name in checkpoint.weights.names():
            checkpoint.weights.part(name).dequantize()
        for spec in build_model(registry(), checkpoint).weights():
            assemble(spec, checkpoint.weights)
    finally:
        checkpoint.weights.close()


def mutations() -> st.SearchStrategy[bytes]:
    """Any moment, any length."""
    parts = st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 1 << 14))
    return parts.map(lambda part: _INPUT.pack(*part))


def seeds() -> list[bytes]:
    return [_INPUT.pack(kind, _NEVER, 0) for kind in (0, 1)]
