"""The model in the types that are measured, each as a file that every engine reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ORIGINAL = "bf16"
"""What `random_model.py` writes: a folder, and the same weights as a GGUF file in it."""


@dataclass(frozen=True)
class Weights:
    """One model in one type."""

    name: str
    model: Path
    """Folder or GGUF file, for engines that read both."""
    gguf: Path


def weights_of(model: Path, types: Sequence[str]) -> list[Weights]:
    """`model` (a folder that holds bf16.gguf, or a GGUF file) in each of `types`; none means the
    model as it is. A type that is no file beside it yet, or an older one, is quantised to one.

    FileNotFoundError if there is nothing to quantise, CalledProcessError if quantising fails.
    """
    model = model.absolute()
    source = model if model.is_file() else model / f"{ORIGINAL}.gguf"
    if not (model / "config.json").exists():
        model = source
    return [_weights(model, source, name) for name in types or [source.stem]]


def _weights(model: Path, source: Path, name: str) -> Weights:
    if name == source.stem:
        return Weights(name, model, source)
    path = source.with_name(f"{name}.gguf")
    if not source.exists():
        raise FileNotFoundError(f"{source} is missing: write it with random_model.py --gguf")
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        quantise(source, path, name)
    return Weights(name, path, path)


def quantise(source: Path, path: Path, name: str) -> None:
    """Writes a folder or a GGUF file in another type; CalledProcessError if that fails."""
    print(f"quantising {source} to {path}", file=sys.stderr)
    command = [sys.executable, "-m", "vllmx", "quantize", "--quiet", "--type", name]
    subprocess.run([*command, str(source), str(path)], check=True, stdout=sys.stderr)
