"""Finds CUDA's libraries and headers: in NVIDIA's wheels, in CUDA_HOME, in the system."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from vllmx_core.errors import BackendUnavailableError

_WHEELS = {
    "nvrtc": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    "cublasLt": ("nvidia-cublas-cu12", "nvidia-cublas"),
    "cublas": ("nvidia-cublas-cu12", "nvidia-cublas"),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
MAJORS = (13, 12)
"""Major versions of CUDA, the newest first."""
_NCCL_MAJORS = (2,)
"""The major versions of NCCL, whose numbering is its own."""
_HEADER = "cuda_bf16.h"


def open_library(stem: str, newest: int = MAJORS[0]) -> tuple[ctypes.CDLL, str]:
    """Opens lib<stem>, from NVIDIA's wheels first, as CuPy does.

    Args:
        newest: the major version of CUDA that the driver runs. Libraries of newer ones, which the
            driver refuses, are tried last.

    Returns the library and the path or name that opened it. Raises BackendUnavailableError that
    says what to install.
    """
    tried: list[str] = []
    for candidate in _candidates(stem, newest):
        try:
            return ctypes.CDLL(candidate), candidate
        except OSError as error:
            tried.append(f"{candidate} ({error})" if os.path.exists(candidate) else candidate)
    cu12, cu13 = _WHEELS[stem]
    raise BackendUnavailableError(
        f"lib{stem} of CUDA 12 or 13 was not found (tried {', '.join(tried)}): pip install {cu13},"
        f" or {cu12} with cupy-cuda12x, or set CUDA_HOME to a toolkit"
    )


def open_companion(path: str, stem: str) -> None:
    """Loads lib<stem> from the folder of the library at `path`, if it is there. NVRTC of CUDA 13.0
    opens it by its bare name, does not search its own folder, but finds a library that is already
    loaded."""
    folder = glob.escape(os.path.dirname(path))
    for companion in sorted(glob.glob(f"{folder}/lib{stem}.so*")) if folder else ():
        with suppress(OSError):
            ctypes.CDLL(companion)


def include_folders(*also: str, newest: int = MAJORS[0]) -> list[str]:
    """Folders with the headers that kernels include; `also`: further headers that must be there;
    `newest`: as for `open_library`. Raises BackendUnavailableError."""
    folders = [*_wheel_folders("include", newest), *(f"{root}/include" for root in _toolkits())]
    wanted = (_HEADER, *also)
    found = [f for f in folders if all(Path(f, header).exists() for header in wanted)]
    if not found:
        raise BackendUnavailableError(
            f"CUDA's headers ({', '.join(wanted)}) were not found: pip install nvidia-cuda-runtime"
            f"{' nvidia-cuda-crt nvidia-cuda-cccl' if also else ''}, or"
            " nvidia-cuda-runtime-cu12 with cupy-cuda12x, or set CUDA_HOME to a toolkit"
        )
    return found[:1]


def _candidates(stem: str, newest: int) -> Iterator[str]:
    for folder in [*_wheel_folders("lib", newest), *(f"{root}/lib64" for root in _toolkits())]:
        yield from sorted(glob.glob(f"{folder}/lib{stem}.so.*[0-9]"), reverse=True)
    for major in _NCCL_MAJORS if stem == "nccl" else _ordered(newest):
        yield f"lib{stem}.so.{major}"


def _ordered(newest: int) -> list[int]:
    """Major versions of CUDA, those that the driver runs first."""
    return sorted(MAJORS, key=lambda major: (major > newest, -major))


def _wheel_folders(kind: str, newest: int) -> list[str]:
    """`kind` folders of NVIDIA's wheels. Wheels of CUDA 13 share the folder cu13; those of CUDA 12,
    and NCCL's, have one each."""
    spec = find_spec("nvidia")
    roots: Sequence[str] = list((spec and spec.submodule_search_locations) or ())
    shared = {major: [f"{root}/cu{major}/{kind}" for root in roots] for major in MAJORS}
    own = [path for root in roots for path in sorted(glob.glob(f"{root}/*/{kind}"))]
    newer = shared[13]
    shared[12] += [path for path in own if path not in newer]
    folders = [path for major in _ordered(newest) for path in shared[major]]
    return [path for path in dict.fromkeys(folders) if os.path.isdir(path)]


def _toolkits() -> list[str]:
    named = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    default = [] if sys.platform == "win32" else ["/usr/local/cuda"]
    return [root for root in [*named, *default] if root and os.path.isdir(root)]
