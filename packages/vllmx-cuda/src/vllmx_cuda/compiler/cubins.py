"""Compiled kernels, cached between starts in the user's cache folder.

The key of a cubin covers everything that decides its bytes: the source, the headers that it
includes, the compiler's options, the architecture and NVRTC's version. Files are renamed into place
and carry a digest, so no process loads a partial one. One process compiles, the others wait. A
folder that another user can write to is never used, as the GPU runs these files.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("vllmx.cuda")

CACHE_VARIABLE = "VLLMX_CACHE_DIR"
KERNELS_FOLDER = Path(__file__).parent.parent / "kernels"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.M)
_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """The folder of this user's caches on this platform, or the one that VLLMX_CACHE_DIR names. A
    user without a home, as containers have them, gets one below the folder for temporary files."""
    named = os.environ.get(CACHE_VARIABLE, "").strip()
    if named:
        return Path(os.path.expanduser(named))
    home = Path(os.path.expanduser("~"))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "vllmx"
    if os.path.isabs(base):
        return Path(base) / "vllmx"
    if not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"vllmx-cache-{os.geteuid()}"
    return home / ".cache" / "vllmx"


def why_unsafe(folder: Path) -> str | None:
    """Why nothing is read from or written to a folder of caches: it is another user's, or others
    may write there. None where it is safe, or not there."""
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to user {status.st_uid}: remove it, or set {CACHE_VARIABLE}"
    if status.st_mode & 0o022:
        return f"others may write to {folder}: chmod go-w {folder}, or set {CACHE_VARIABLE}"
    return None


def private_folder(folder: Path) -> Path:
    """The folder, made for this user alone where it is missing. Raises OSError where that cannot be
    done, PermissionError where it is not safe."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = why_unsafe(folder)
    if reason is not None:
        raise PermissionError(reason)
    return folder


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: a source with one set of definitions."""

    source: Path
    defines: tuple[str, ...] = ()
    """NAME=value"""

    @property
    def name(self) -> str:
        return " ".join([self.source.name, *self.defines])


class Compiler(Protocol):
    """`vllmx_cuda.compiler.nvrtc.Nvrtc`, as much of it as a cache needs."""

    @property
    def version(self) -> tuple[int, int]: ...

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Target:
    """The architecture that all units of a process are compiled for, with the compiler and its
    headers."""

    arch: str
    compiler_version: tuple[int, int]
    include_folders: tuple[str, ...]

    def options(self, unit: Unit) -> list[str]:
        return [
            f"--gpu-architecture={self.arch}",
            "--std=c++17",
            "-lineinfo",
            *(f"--define-macro={define}" for define in unit.defines),
            f"--include-path={unit.source.parent}",
            *(f"--include-path={folder}" for folder in self.include_folders),
        ]


@dataclass
class Keys:
    """Keys of units for one target. Reads every file once."""

    target: Target
    _files: dict[Path, tuple[bytes, tuple[Path, ...]]] = field(default_factory=dict)

    def key(self, unit: Unit) -> str:
        """Hexadecimal. Folders are left out: the same files elsewhere give the same cubin."""
        options = [o for o in self.target.options(unit) if not o.startswith("--include-path")]
        digest = hashlib.sha256(repr((options, self.target.compiler_version)).encode())
        for path in self._closure(unit.source):
            digest.update(path.name.encode() + b"\0" + self._read(path)[0])
        return digest.hexdigest()

    def _closure(self, source: Path) -> list[Path]:
        """The source and every file that it may include, in a fixed order."""
        found, waiting = [source], [source]
        while waiting:
            for path in self._read(waiting.pop())[1]:
                if path not in found:
                    found.append(path)
                    waiting.append(path)
        return found

    def _read(self, path: Path) -> tuple[bytes, tuple[Path, ...]]:
        """Digest of a file, and the files that its #include lines lead to. Lines that preprocessing
        would drop count too: a key may change needlessly, but never stay by mistake."""
        if path not in self._files:
            text = path.read_bytes()
            folders = (path.parent, *map(Path, self.target.include_folders))
            leads = []
            for name in _INCLUDE.findall(text):
                candidates = (folder / name.decode(errors="replace") for folder in folders)
                leads += [c for c in candidates if c.is_file()][:1]
            self._files[path] = (hashlib.sha256(text).digest(), tuple(leads))
        return self._files[path]


@dataclass(frozen=True, slots=True)
class CubinCache:
    """Cubins of one folder. Where the folder cannot be written or trusted, every start compiles
    anew."""

    folder: Path

    def load(self, key: str) -> bytes | None:
        """None when it is missing or damaged, or the folder not safe."""
        if why_unsafe(self.folder) is not None:
            return None
        try:
            stored = self._path(key).read_bytes()
        except OSError:
            return None
        digest, cubin = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        return cubin if hashlib.sha256(cubin).digest() == digest else None

    def get_or_compile(self, key: str, unit: Unit, target: Target, compiler: Compiler) -> bytes:
        """Raises CompileError of the compiler."""
        cubin = self.load(key)
        if cubin is not None:
            return cubin
        with self._alone(key):
            cubin = self.load(key)  # another process may have made it meanwhile
            if cubin is None:
                source = unit.source.read_text()
                cubin = compiler.compile(source, unit.source.name, target.options(unit))
                self._store(key, cubin)
        return cubin

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def _store(self, key: str, cubin: bytes) -> None:
        try:
            write_whole(self._path(key), hashlib.sha256(cubin).digest() + cubin)
        except OSError as error:
            logger.warning("a compiled kernel cannot be kept in %s: %s", self.folder, error)

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """One process at a time for each key; without a lock where the folder cannot be written, or
        its file system has none."""
        path = self.folder / f".{key}.lock"
        try:
            private_folder(self.folder)
            lock = path.open("w")
        except OSError as error:
            logger.warning("kernels cannot be cached in %s: %s", self.folder, error)
            yield
            return
        try:
            with lock:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
                yield
        finally:
            path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """A file in a private folder that nobody ever sees half of. Raises OSError, and leaves nothing
    behind."""
    private_folder(path.parent)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def kernel_cache() -> CubinCache:
    """The cache of cubins that belongs to this user."""
    return CubinCache(cache_folder() / "cuda")


def missing(cache: CubinCache, keys: Mapping[Unit, str]) -> list[Unit]:
    """Units that the cache does not hold."""
    return [unit for unit, key in keys.items() if cache.load(key) is None]
