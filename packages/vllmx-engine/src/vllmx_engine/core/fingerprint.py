"""A digest of all that keys and values depend on, except for the tokens: for blocks that outlive
the process."""

from __future__ import annotations

import os
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from vllmx_core.backend import LoadedInfo
from vllmx_core.weights.file_names import weight_files

from vllmx_engine.core.found_model import FoundModel

if TYPE_CHECKING:
    from hashlib import _Hash

    from vllmx_engine.core.engine_core import EngineCore

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_END_BYTES = 1 << 16
_NUM_SAMPLES = 256
"""Samples of a model, and a few more if it has several files. Reading them takes 14 ms from an SSD
without a cache."""
_SUFFIXES = (".safetensors", ".gguf")
_FIELDS = (
    "model_impl", "isq", "dtype", "max_model_len", "enforce_eager", "deterministic", "task",
)  # fmt: skip
"""Options that a model computes by. Rotations can depend on `max_model_len`."""


def fingerprint(found: FoundModel, info: LoadedInfo) -> str:
    """A digest of a model's files, by their names, sizes, times and samples of their content, and
    of the options and the code that it computes by. A copy with other times is another model."""
    digest = blake2b(digest_size=32)
    roots = [path for path in (found.path, found.mmproj) if path is not None]
    for path in (
        file for root in roots for file in (*weight_files(root), *sorted(root.glob("*.json")))
    ):
        facts = path.stat()
        digest.update(repr((path.name, facts.st_size, facts.st_mtime_ns)).encode())
        with open(path, "rb") as file:
            for number in range(_SAMPLES):
                at = number * max(_SAMPLE_BYTES, facts.st_size // _SAMPLES)
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
    options = [getattr(found.config, name) for name in _FIELDS]
    digest.update(repr((options, _kernels(info))).encode())
    return digest.hexdigest()


def blocks_of(found: FoundModel, core: EngineCore, block_bytes: int) -> str:
    """See `CoreInfo.blocks_of`: the same for cores that have the same model, by the name that their
    caches are identified by."""
    identity, info = core.scheduler.cache.identity, core.model_info
    options = ", ".join(f"{name} {getattr(found.config, name)}" for name in _FIELDS)
    return (
        f"{identity.model} in {identity.dtype}, {block_bytes} bytes for {identity.block_size}"
        f" tokens, {' '.join(map(str, _kernels(info)))} ({options})"
    )


def _kernels(info: LoadedInfo) -> tuple[object, ...]:
    """The code and the device that compute a model."""
    try:
        release = version(f"vllmx-{info.backend}")
    except PackageNotFoundError:  # such as numpy, which is part of the core
        release = version("vllmx-core")
    return (
        info.backend,
        release,
        info.device,
        info.details.get("instruction set"),
        info.cache_windows,
    )


def files_digest(path: Path) -> str:
    """A digest of a folder's config and weight files, or of one file, whatever their times: names,
    sizes and samples, which are closer together than the size of any layer."""
    files = [path] if path.is_file() else sorted(filter(_is_of_model, path.iterdir()))
    step = sum(file.stat().st_size for file in files) // _NUM_SAMPLES
    digest = sha256()
    for file in files:
        if file != path:
            digest.update(file.name.encode() + b"\0")
        _add(digest, file, step)
    return digest.hexdigest()


def _is_of_model(file: Path) -> bool:
    return file.suffix in _SUFFIXES or file.name == "config.json"


def _add(digest: _Hash, path: Path, step: int) -> None:
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
