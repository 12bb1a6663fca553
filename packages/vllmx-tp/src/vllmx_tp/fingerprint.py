"""What tells one model's files from another's, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from vllmx_core.errors import ConfigError
from vllmx_engine.core.found_model import FoundModel

_SAMPLE_BYTES = 1 << 16
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
    """Digests a folder's config and files of weights, or one file: names, sizes and samples."""
    digest = hashlib.sha256()
    if path.is_file():
        _add(digest, path)
        return digest.hexdigest()
    files = [one for one in path.iterdir() if one.suffix in _SUFFIXES or one.name == "config.json"]
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0")
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
