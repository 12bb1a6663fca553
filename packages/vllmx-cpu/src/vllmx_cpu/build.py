"""Compiles the native kernels with the system's C++ compiler: `python -m vllmx_cpu.build`.

A source whose first line is `// VX: per instruction set` is compiled once for each instruction set
of this architecture with its flags and `-DVX_ISA=<name>`; the others are compiled once. Everything
is linked into one shared library next to this file, and the library carries a marker with the hash
of its sources, so that a stale one is recognised. Standard library only: the hatch build hook runs
this file before anything is installed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("vllmx.cpu.build")


PACKAGE = Path(__file__).resolve().parent
NATIVE = PACKAGE / "native"
_NAMES = {"win32": "vllmx_cpu.dll", "darwin": "libvllmx_cpu.dylib"}
LIBRARY = PACKAGE / _NAMES.get(sys.platform, "libvllmx_cpu.so")
PER_ISA = "// VX: per instruction set"
MARKER = b"vllmx-cpu-sources:"

COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unused-function",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",  # GCC 12 warns inside its own intrinsics
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mprefer-vector-width=512", "-mavx512bf16", "-mavx512vnni")
_AMX = (*_AVX512_BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        # Those of the oldest processors are no slower with -O2, and 50 kB less of every download.
        "portable": ("-march=x86-64", "-O2"),
        "avx2": _AVX2,
        "avx512": (*_AVX512, "-mprefer-vector-width=512"),
        "avx512bf16": _AVX512_BF16,
        "amx": _AMX,
    },
    "aarch64": {"neon": (), "dotprod": ("-march=armv8.2-a+dotprod",)},
}


class BuildError(Exception):
    """The library cannot be built here; the message says why and what to do."""


class Toolchain(NamedTuple):
    """A C++ compiler and what it can compile for."""

    command: tuple[str, ...]
    version: str
    isas: dict[str, tuple[str, ...]]
    is_for_windows: bool


def target(command: tuple[str, ...]) -> tuple[str, bool]:
    """The processor that a compiler compiles for, as the tables of this module name it, and whether
    the system is Windows: a cross compiler's is not this machine. For a compiler that does not
    tell, this machine."""
    import platform
    import subprocess

    probe = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, check=False)  # noqa: S603
    triple = (probe.stdout.strip() or f"{platform.machine()}-{sys.platform}").lower()
    machine = triple.split("-")[0]
    is_for_windows = re.search("windows|mingw|win32", triple) is not None
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), is_for_windows


def default_output() -> Path:
    """LIBRARY, or a library for Windows if CXX names a cross compiler."""
    is_for_windows = re.search("windows|mingw", os.environ.get("CXX", ""))
    return PACKAGE / _NAMES["win32"] if is_for_windows else LIBRARY


def source_hash() -> str:
    """Hash of everything that decides what the library does."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, ISA_FLAGS)).encode())
    for path in sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def built_hash(library: Path | None = None) -> str | None:
    """The source hash that a built library carries; None without a library. Reads the file instead
    of loading it, because a loaded library could not be replaced in this process."""
    library = library or LIBRARY
    if not library.exists():
        return None
    found = re.search(re.escape(MARKER) + rb"([0-9a-f]{32})", library.read_bytes())
    return found.group(1).decode() if found else "unknown"


def find_toolchain() -> Toolchain:
    """The compiler named by CXX, or the first of c++, g++, clang++. Raises BuildError."""
    import shlex
    import shutil

    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    for candidate in candidates:
        command = tuple(shlex.split(candidate, posix=os.name == "posix"))
        if not command or shutil.which(command[0]) is None:
            continue
        version = _run([*command, "--version"]).splitlines()[0]
        machine, is_for_windows = target(command)
        table = ISA_FLAGS.get(machine)
        if table is None:
            raise BuildError(
                f"no kernels for the processor architecture {machine!r}: x86-64 and 64-bit ARM are"
                " supported"
            )
        if is_for_windows:
            if "clang" not in version:
                raise BuildError(
                    f"{version} keeps the stack of Windows programs at multiples of 16 bytes, where"
                    " kernels of AVX crash: set CXX to Clang for the GNU target, such as"
                    " 'python -m ziglang c++ -target x86_64-windows-gnu' (pip install ziglang)"
                )
            # Zig knows the baseline by another name; tiles on Windows were never run.
            table = {name: _windows_flags(flags) for name, flags in table.items() if name != "amx"}
        refusals = {name: _refusal(command, flags) for name, flags in table.items()}
        isas = {name: flags for name, flags in table.items() if refusals[name] is None}
        if not isas:
            raise BuildError(
                f"{version} cannot compile our C++17 ({next(iter(refusals.values()))}): use GCC 10"
                " or Clang 12 or newer"
            )
        return Toolchain(command, version, isas, is_for_windows)
    if named:
        raise BuildError(f"CXX names {named!r}, which is not on the PATH")
    raise BuildError(
        "no C++ compiler was found: install one (Debian and Ubuntu: apt install g++; Fedora: dnf"
        " install gcc-c++; macOS: xcode-select --install), then run: python -m vllmx_cpu.build"
    )


def _windows_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("-march=x86_64" if flag == "-march=x86-64" else flag for flag in flags)


Progress = Callable[[int, int], None]
"""Told after each file: (files that are compiled, all)."""


def build(
    output: Path | None = None, objects: Path | None = None, progress: Progress | None = None
) -> Toolchain:
    """Compiles and links the library, replacing it atomically. Objects that are still good in
    `objects` are taken from there. Raises BuildError with the compiler's message."""
    toolchain, output = find_toolchain(), output or LIBRARY
    if toolchain.is_for_windows and output.suffix != ".dll":
        raise BuildError(
            f"{toolchain.version} compiles for Windows, not {output.name}: set CXX to a compiler"
            " for this system"
        )
    keep = objects or _object_folder()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        with _locked(keep / ".lock"):
            return _build(toolchain, output, keep, progress)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vllmx-cpu-") as folder:
        return _build(toolchain, output, Path(folder), progress)


def ensure_built(progress: Progress | None = None) -> bool:
    """Builds when the library is missing or stale; True when it did."""
    if built_hash() == source_hash():
        return False
    logger.warning(
        "the native kernels are missing or older than their sources: compiling them, once, which"
        " takes some minutes"
    )
    build(progress=progress)
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time into a folder of objects: each build removes the others' stale
    ones. The second finds everything compiled."""
    with path.open("w") as lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _build(
    toolchain: Toolchain, output: Path, objects: Path, progress: Progress | None
) -> Toolchain:
    from concurrent.futures import ThreadPoolExecutor

    objects.mkdir(parents=True, exist_ok=True)
    jobs, built = _jobs(toolchain), []
    with ThreadPoolExecutor(max_workers=_cores()) as pool:
        for path in pool.map(lambda job: _compile(toolchain, objects, *job), jobs):
            built.append(path)
            if progress is not None:
                progress(len(built), len(jobs))
    for stale in set(objects.glob("*.o")) - set(built):
        stale.unlink(missing_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    # Names of local functions are 250 kB that profilers alone read: take out -s to see them.
    shared = ["-dynamiclib"] if output.suffix == ".dylib" else ["-shared", "-s"]
    # Objects for the baseline come first: of a function that several define (a template of the
    # standard library), the linker keeps the first.
    _run([*toolchain.command, *shared, "-pthread", "-o", str(partial), *map(str, built)])
    os.replace(partial, output)
    output.with_name(f"{built[0].stem}.lib").unlink(missing_ok=True)  # Zig's import library
    return toolchain


def _jobs(toolchain: Toolchain) -> list[tuple[Path, str, tuple[str, ...]]]:
    """(source, object stem, flags), the baseline first."""
    sources = sorted(NATIVE.glob("*.cpp"))
    per_isa = [path for path in sources if path.read_text().startswith(PER_ISA)]
    listed = "".join(f"VX_X({name})" for name in toolchain.isas)
    compiler = re.sub(r"[^\w .()+-]", "", toolchain.version)
    once = (
        f"-DVX_ISA_LIST={listed}",
        f'-DVX_SOURCE_MARKER="{MARKER.decode()}{source_hash()}"',
        f'-DVX_COMPILER="{compiler}"',
    )
    jobs: list[tuple[Path, str, tuple[str, ...]]] = [
        (path, path.stem, once) for path in sources if path not in per_isa
    ]
    for name, flags in toolchain.isas.items():
        jobs += [(path, f"{path.stem}.{name}", (*flags, f"-DVX_ISA={name}")) for path in per_isa]
    return jobs


def _compile(
    toolchain: Toolchain, objects: Path, source: Path, stem: str, flags: tuple[str, ...]
) -> Path:
    command = [*toolchain.command, *COMMON_FLAGS, *flags]
    if toolchain.is_for_windows:
        command.remove("-fPIC")
    if "clang" in toolchain.version:
        command.append("-Wno-unknown-warning-option")  # some of the above are GCC's alone
    digest = hashlib.sha256(repr((command, toolchain.version)).encode())
    for path in _included(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = objects / f"{stem}.{digest.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.part")
        _run([*command, "-c", str(source), "-o", str(partial)])
        os.replace(partial, target)
    return target


def _included(source: Path) -> list[Path]:
    """A source and the headers of its folder that it includes, directly or not, in the order of
    their names: its object depends on them."""
    found, waiting = {source}, [source]
    while waiting:
        for name in re.findall(
            r'^\s*#\s*include "([^"]+)"', waiting.pop().read_text(), re.MULTILINE
        ):
            header = source.parent / name
            if header not in found and header.exists():
                found.add(header)
                waiting.append(header)
    return sorted(found)


def _object_folder() -> Path | None:
    """The folder of a source tree (ignored by git) that makes the next build incremental; None
    elsewhere."""
    root = PACKAGE.parent.parent
    return root / "build" / "native" if (root / "pyproject.toml").exists() else None


def _refusal(command: tuple[str, ...], flags: tuple[str, ...]) -> str | None:
    """A compiler's complaint about the flags of an instruction set; None: it knows them."""
    import subprocess

    # Not -fsyntax-only, which Zig does not know.
    probe = [*command, "-std=c++17", *flags, "-x", "c++", "-c", "-o", os.devnull, "-"]
    result = subprocess.run(probe, input="int x;", capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode == 0:
        return None
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[0]


def _run(command: list[str]) -> str:
    import shlex
    import subprocess

    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr.strip()[-4000:]}")
    if result.stderr.strip():
        logger.warning("%s", result.stderr.strip()[-4000:])
    return result.stdout


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when the library is there afterwards."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m vllmx_cpu.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=default_output(), help="library to write")
    parser.add_argument("--objects", type=Path, help="folder that keeps the object files")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        toolchain = build(chosen.output, chosen.objects)
    except BuildError as error:
        logger.error("vllmx-cpu: %s", error)
        return 1
    logger.info(
        "built %s with %s for %s", chosen.output, toolchain.version, ", ".join(toolchain.isas)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
