"""What tells one model's files from another's, without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
from vllmx_core.errors import ConfigError
from vllmx_engine.core.found_model import FoundModel

_END_BYTES = 1 << 16
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 256
"""Samples of a model, and a few more where it has several files. They take 14 ms of an SSD whose
files nobody has read before."""
_SUFFIXES = (".safetensors", ".gguf")


class Marks(msgspec.Struct, frozen=True):
    """Fingerprints of what a model is loaded from."""

    model: str
    tower: str | None = None
    """The fingerprint of the file of --mmproj; None: there is none."""

    @classmethod
    def of(cls, found: FoundModel) -> Marks:
        tower = None if found.mmproj is None else fingerprint(found.mmproj)
        return cls(fingerprint(found.path), tower)

    def check(self, wanted: Marks, found: FoundModel, place: str) -> None:
        """Raises ConfigError where the host at `place`, whose files these are, has others than
        rank 0 wants. A tower that rank 0 does without is no matter."""
        if wanted.model != self.model:
            raise ConfigError(
                f"the host of ranks at {place} has other files of the model in"
                f" {found.path} than rank 0: copy the same ones to all hosts",
                param="rank_hosts",
            )
        if wanted.tower is None or wanted.tower == self.tower:
            return
        wrong = "no --mmproj" if found.mmproj is None else f"another file in {found.mmproj}"
        raise ConfigError(
            f"rank 0 has --mmproj, and the host of ranks at {place} has {wrong}: copy the file"
            " there, and name it by `vllmx rank --mmproj FILE`",
            param="mmproj",
        )


def fingerprint(path: Path) -> str:
    """Digests a folder's config and files of weights, or one file: names, sizes and samples, which
    lie closer together than the layers of any model are long."""
    files = [path] if path.is_file() else sorted(filter(_is_of_model, path.iterdir()))
    step = sum(file.stat().st_size for file in files) // _NUM_SAMPLES
    digest = hashlib.sha256()
    for file in files:
        if file != path:
            digest.update(file.name.encode() + b"\0")
        _add(digest, file, step)
    return digest.hexdigest()


def _is_of_model(file: Path) -> bool:
    return file.suffix in _SUFFIXES or file.name == "config.json"


def _add(digest: hashlib._Hash, path: Path, step: int) -> None:
    """Adds both ends, and a sample for each `step` bytes."""
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        for at in (0, max(0, size - _END_BYTES)):
            file.seek(at)
            digest.update(file.read(_END_BYTES))
        for at in range(0, size, max(step, _SAMPLE_BYTES)):
            file.seek(at - at % _SAMPLE_BYTES)  # a page of the disk
            digest.update(file.read(_SAMPLE_BYTES))
