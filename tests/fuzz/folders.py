"""Model folders that live as long as one input."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from vllmx_core.plugins.registry import Registry, load_registry


@cache
def registry() -> Registry:
    return load_registry()


def memory_folder() -> str | None:
    """A folder where files cost no disk; None: anywhere."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


@contextmanager
def folder_of(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder with these files."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
        for file, data in files.items():
            Path(name, file).write_bytes(data)
        yield Path(name)
