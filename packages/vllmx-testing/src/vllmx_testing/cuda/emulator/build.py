"""Compiles kernels for the emulator: one shared library a variant, once for each content, whichever
clone of the repository has it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import vllmx_cuda
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.compiler.libraries import include_folders

KERNELS = Path(vllmx_cuda.__file__).parent / "kernels"
NATIVE = Path(__file__).parent / "native"
RUNTIME_SOURCES = ("runtime.cpp", "collectives.cpp", "warpgroup.cpp", "peers.cpp", "checker.cpp")
COMPILE = (
    "-std=c++17",
    "-fPIC",
    "-g1",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Winvalid-pch",
)
# Instrumentation that calls the hooks of checker.cpp
CHECK = ("-fsanitize=thread,alignment,bounds", "-fsanitize-recover=alignment,bounds")


@functools.cache
def find_cuda_headers() -> tuple[str, ...]:
    """Include folders with what NVIDIA's number types need on a host compiler.

    Raises:
        BackendUnavailableError: they are nowhere; the message names the packages.
    """
    return tuple(include_folders("crt/host_defines.h", "nv/target"))


def check_available() -> None:
    """Raises BackendUnavailableError where kernels cannot be emulated, and says why."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise BackendUnavailableError(
            "the emulator switches stacks by code for x86-64 Linux, this is"
            f" {platform.machine()} {sys.platform}: run these tests on such a machine"
        )
    if shutil.which("g++") is None:
        raise BackendUnavailableError("the emulator compiles kernels with g++: install it")
    find_cuda_headers()


def build_module(
    source: Path, defines: Sequence[str] = (), *, check: bool, include: Sequence[Path] = ()
) -> Path:
    """Path of a shared library with the entries of `source`, compiled unless the cache has it.

    Args:
        defines: `NAME=value`.
        check: instrument every access of the kernel.
        include: further folders for the kernel's own headers; `vllmx_cuda/kernels` is known.

    Raises:
        BackendUnavailableError: see `check_available`.
        subprocess.CalledProcessError: the source does not compile; g++ has said why.
    """
    check_available()
    folders = (source.parent, *include, KERNELS, NATIVE)
    headers = sorted(path for folder in set(folders) for path in folder.glob("*.h"))
    how = ("-O1", *(CHECK if check else ()))
    given = (f"-D{text}" for text in defines)
    kernel = _compile(
        [*how, "-include", str(_prelude(how)), *given, "-x", "c++", "-c"], source, headers, folders
    )
    runtime = [
        _compile(
            ["-O2", *(["-DEMU_CHECK"] if check else []), "-c"],
            NATIVE / name,
            sorted(NATIVE.glob("*.h")),
            (NATIVE,),
        )
        for name in RUNTIME_SOURCES
    ]
    # GNU gold links in a third of the time that ld takes, which is a fifth of the whole.
    linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
    return _once(["g++", "-shared", *linker, "-Wl,-z,now"], [kernel, *runtime], ".so")


def _prelude(how: Sequence[str]) -> Path:
    """Precompiles native/prelude.h with these options and returns the header's own path: g++ picks
    up the precompiled header next to it, or reads the header if that does not match."""
    parsed = _compile(["-x", "c++-header", *how], NATIVE / "prelude.h", (), (), ".h.gch")
    header = parsed.with_suffix("")
    if not header.exists():
        unfinished = header.with_suffix(f".{os.getpid()}")
        shutil.copyfile(NATIVE / "prelude.h", unfinished)
        unfinished.replace(header)
    return header


def _compile(
    options: Sequence[str],
    source: Path,
    headers: Iterable[Path],
    folders: Iterable[Path],
    suffix: str = ".o",
) -> Path:
    where = [f"-I{folder}" for folder in dict.fromkeys(folders)]
    where += [f"-isystem{folder}" for folder in find_cuda_headers()]
    command = ["g++", *COMPILE, *options]
    return _once(command, [source], suffix, also_read=headers, where=where)


@functools.cache
def _number_types() -> str:
    """Tells NVIDIA's headers, which everything is compiled with, from those of another release."""
    names = [f"cuda_{kind}.{suffix}" for kind in ("bf16", "fp16", "fp8") for suffix in ("h", "hpp")]
    paths = [Path(folder) / name for folder in find_cuda_headers() for name in names]
    text = b"".join(path.read_bytes() for path in paths if path.exists())
    return hashlib.sha256(text).hexdigest()


def _once(
    command: Sequence[str],
    inputs: Sequence[Path],
    suffix: str,
    also_read: Iterable[Path] = (),
    where: Sequence[str] = (),
) -> Path:
    """Runs the command unless its output is there; the key is the command and all it reads, but not
    `where`: the options that say in which folders."""
    digest = hashlib.sha256(repr((command, _number_types())).encode())
    for path in (*inputs, *also_read):
        digest.update(path.read_bytes())
    folder = _cache_folder()
    output = folder / f"{inputs[0].stem}-{digest.hexdigest()[:24]}{suffix}"
    if not output.exists():
        handle, unfinished = tempfile.mkstemp(dir=folder)
        os.close(handle)
        try:
            subprocess.run(  # noqa: S603
                [*command, *where, *map(str, inputs), "-o", unfinished], check=True
            )
            Path(unfinished).replace(output)  # atomic: another process may make the same
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return output


def _cache_folder() -> Path:
    """A folder of this user alone: what lies in it is loaded as code."""
    folder = Path(tempfile.gettempdir()) / f"vllmx-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendUnavailableError(
            f"{folder} belongs to somebody else or is open to others: remove it, or set TMPDIR"
        )
    return folder
