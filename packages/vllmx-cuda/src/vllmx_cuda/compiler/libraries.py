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
_MAJORS = (13, 12)
_NCCL_MAJORS = (2,)
"""The major versions of NCCL, whose numbering is its own."""
_HEADER = "cuda_bf16.h"


def open_library(stem: str) -> tuple[ctypes.CDLL, str]:
    """lib<stem> and the path or name that it was opened by; the wheels' copy first, which CuPy
    opens too. Raises BackendUnavailableError that says what to install."""
    tried: list[str] = []
    for candidate in _candidates(stem):
        try:
            return ctypes.CDLL(candidate), candidate
        except OSError as error:
            tried.append(f"{candidate} ({error})" if os.path.exists(candidate) else candidate)
    cu12, cu13 = _WHEELS[stem]
    raise BackendUnavailableError(
        f"lib{stem} of CUDA 12 or 13 was not found (tried {', '.join(tried)}): pip install {cu13},"
        f" or {cu12} beside cupy-cuda12x, or set CUDA_HOME to a toolkit"
    )


def open_companion(path: str, stem: str) -> None:
    """Loads lib<stem> from beside a library that opens it by its bare name: NVRTC of CUDA 13.0 does
    not look into its own folder, and finds what is loaded already. Nothing where there is none."""
    folder = glob.escape(os.path.dirname(path))
    for companion in sorted(glob.glob(f"{folder}/lib{stem}.so*")) if folder else ():
        with suppress(OSError):
            ctypes.CDLL(companion)


def include_folders(*also: str) -> list[str]:
    """Folders with the headers that kernels include; `also`: further headers that must be there.
    Raises BackendUnavailableError."""
    folders = [*_wheel_folders("include"), *(f"{root}/include" for root in _toolkits())]
    wanted = (_HEADER, *also)
    found = [f for f in folders if all(Path(f, header).exists() for header in wanted)]
    if not found:
        raise BackendUnavailableError(
            f"CUDA's headers ({', '.join(wanted)}) were not found: pip install nvidia-cuda-runtime"
            f"{' nvidia-cuda-crt nvidia-cuda-cccl' if also else ''}, or"
            " nvidia-cuda-runtime-cu12 beside cupy-cuda12x, or set CUDA_HOME to a toolkit"
        )
    return found[:1]


def _candidates(stem: str) -> Iterator[str]:
    for folder in [*_wheel_folders("lib"), *(f"{root}/lib64" for root in _toolkits())]:
        yield from sorted(glob.glob(f"{folder}/lib{stem}.so.*[0-9]"), reverse=True)
    for major in _NCCL_MAJORS if stem == "nccl" else _MAJORS:
        yield f"lib{stem}.so.{major}"


def _wheel_folders(kind: str) -> list[str]:
    """`kind` folders of NVIDIA's wheels: those of CUDA 13 share one tree, those of 12 do not."""
    spec = find_spec("nvidia")
    roots: Sequence[str] = list((spec and spec.submodule_search_locations) or ())
    shared = [f"{root}/cu{major}/{kind}" for root in roots for major in _MAJORS]
    own = [path for root in roots for path in sorted(glob.glob(f"{root}/*/{kind}"))]
    return [path for path in dict.fromkeys([*shared, *own]) if os.path.isdir(path)]


def _toolkits() -> list[str]:
    named = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    default = [] if sys.platform == "win32" else ["/usr/local/cuda"]
    return [root for root in [*named, *default] if root and os.path.isdir(root)]
