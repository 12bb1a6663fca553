"""NVRTC by ctypes: CUDA source text to a cubin. Needs no GPU and no CuPy.

CuPy's own compile helper needs a current device, adds an architecture of its own and ignores
headers in its cache key; see `vllmx_cuda.compiler.cubins` for our cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from vllmx_core.errors import BackendUnavailableError, VllmxError

from vllmx_cuda.compiler.libraries import MAJORS, open_companion, open_library

_SIGNATURES: dict[str, list[Any]] = {
    "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
    "nvrtcGetNumSupportedArchs": [POINTER(c_int)],
    "nvrtcGetSupportedArchs": [POINTER(c_int)],
    "nvrtcCreateProgram": [
        POINTER(c_void_p),
        c_char_p,
        c_char_p,
        c_int,
        POINTER(c_char_p),
        POINTER(c_char_p),
    ],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_char_p],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
}


class CompileError(VllmxError):
    """NVRTC refused a source; the message ends with its log."""

    code = "kernel_compilation_failed"


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """The opened library. Calls release the GIL, so that threads compile in parallel."""

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]
    capabilities: frozenset[int]
    """Architectures that it compiles for, as 75, 80, 90, ..."""

    @classmethod
    def open(cls, newest: int = MAJORS[0]) -> Nvrtc:
        """Opens libnvrtc; `newest`: see `open_library`. Raises BackendUnavailableError where there
        is none."""
        library, path = open_library("nvrtc", newest)
        open_companion(path, "nvrtc-builtins")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        major, minor, count = c_int(), c_int(), c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (c_int * count.value)()
        library.nvrtcGetSupportedArchs(known)
        return cls(library, path, (major.value, minor.value), frozenset(known))

    def check_architecture(self, arch: str) -> None:
        """Raises BackendUnavailableError for one that this NVRTC does not compile for."""
        number = int(arch.removeprefix("sm_").rstrip("af"))
        if number not in self.capabilities:
            known = ", ".join(str(one) for one in sorted(self.capabilities))
            version = f"{self.version[0]}.{self.version[1]}"
            raise BackendUnavailableError(
                f"NVRTC {version} ({self.path}) does not compile for {arch}, it knows {known}:"
                " install a newer nvidia-cuda-nvrtc, for the oldest GPUs one of CUDA 12"
            )

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """The cubin; `options` name the architecture. Raises CompileError with the log."""
        program = c_void_p()
        status = self.library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
        if status:
            raise CompileError(f"{name}: nvrtcCreateProgram failed with status {status}")
        try:
            encoded = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self.library.nvrtcCompileProgram(program, len(options), encoded)
            if status:
                raise CompileError(
                    f"{name}: NVRTC status {status} with {' '.join(options)}\n{self._log(program)}"
                )
            return self._cubin(program)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: c_void_p) -> str:
        size = c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        self.library.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")

    def _cubin(self, program: c_void_p) -> bytes:
        size = c_size_t()
        self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
