"""The shared library: loading it, choosing the instruction set, and its C functions with types."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from ctypes import byref, c_char_p, c_int32, c_size_t, c_void_p
from functools import cache

from vllmx_core.errors import BackendUnavailableError, CapacityError, ConfigError
from vllmx_core.records import Record
from vllmx_core.system.progress import show_progress

from vllmx_cpu import build
from vllmx_cpu.structs import MIRRORED, VxJob

logger = logging.getLogger("vllmx.cpu")

ISA_VARIABLE = "VLLMX_CPU_ISA"
SCRATCH_BYTES = 2 << 20


@cache
def library() -> ctypes.CDLL:
    """The library, built first when it is missing or older than its sources. Raises
    BackendUnavailableError that says what to install."""
    try:
        if build.ensure_built(_show_compiling if sys.stderr.isatty() else None):
            logger.info("native kernels were missing or stale and have been rebuilt")
        lib = ctypes.CDLL(str(build.LIBRARY))
    except (build.BuildError, OSError) as error:
        raise BackendUnavailableError(f"the CPU kernels cannot be loaded: {error}") from error
    _declare(lib)
    for mirror in MIRRORED:
        native_bytes = lib.vx_struct_bytes(mirror.__name__.encode())
        assert native_bytes == ctypes.sizeof(mirror), f"{mirror.__name__} is not as in C++"
    return lib


def _show_compiling(done: int, total: int) -> None:
    show_progress("compiling the CPU kernels", done, total)


def _declare(lib: ctypes.CDLL) -> None:
    sizes = (c_int32, c_int32, c_int32, c_int32)
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "vx_isa_name": (c_char_p, (c_int32,)),
        "vx_isa_supported": (c_int32, (c_int32,)),
        "vx_compiler": (c_char_p, ()),
        "vx_struct_bytes": (c_size_t, (c_char_p,)),
        "vx_packed_bytes": (c_size_t, (c_int32, c_int32, c_int32)),
        "vx_pack_rows": (
            None,
            (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32, c_int32, c_int32),
        ),
        "vx_pack_blocks": (
            None,
            (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32, c_int32),
        ),
        "vx_pack_mxfp4": (
            None,
            (c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_int32),
        ),
        "vx_pack_coded": (
            None,
            (
                c_void_p,
                c_int32,
                c_int32,
                c_int32,
                c_void_p,
                c_void_p,
                c_void_p,
                c_int32,
                c_int32,
            ),
        ),
        "vx_encode": (c_int32, (c_int32, c_void_p)),
        "vx_team_create": (c_void_p, (c_int32, c_size_t)),
        "vx_team_destroy": (None, (c_void_p,)),
        "vx_submit": (c_int32, (c_void_p, c_void_p)),
        "vx_wait": (None, (c_void_p, c_void_p)),
        "vx_k_page_bytes": (c_size_t, sizes),
        "vx_v_page_bytes": (c_size_t, sizes),
        "vx_attention_workspace_bytes": (c_size_t, (*sizes, c_int32)),
        "vx_sampler_workspace_bytes": (c_size_t, (c_int32, c_int32)),
        "vx_experts_workspace_bytes": (c_size_t, (*sizes, c_int32, c_int32)),
        "vx_latent_workspace_bytes": (c_size_t, (*sizes, c_int32, c_int32, c_int32)),
        "vx_segment_workspace_bytes": (c_size_t, (*sizes, c_int32, c_int32)),
        "vx_latent_rows": (c_int32, (c_int32, c_int32)),
        "vx_panels_bytes": (c_size_t, (c_int32, c_int32, c_int32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


class Isa(Record):
    """One instruction set of the library."""

    name: str
    index: int
    supported: bool

    def op(self, name: str, arguments: type[ctypes.Structure]) -> int:
        """Address of the op's function, which takes these arguments."""
        symbol, lib = f"vx_op_{self.name}_{name}", library()
        native_bytes = int(getattr(lib, f"{symbol}_bytes")())
        assert native_bytes == ctypes.sizeof(arguments), f"{arguments.__name__} is not as in C++"
        return ctypes.cast(getattr(lib, symbol), c_void_p).value or 0


def instruction_sets() -> list[Isa]:
    """All that were compiled in, from the least to the most capable."""
    lib = library()
    found: list[Isa] = []
    while (name := lib.vx_isa_name(len(found))) is not None:
        found.append(Isa(name.decode(), len(found), bool(lib.vx_isa_supported(len(found)))))
    return found


def choose_isa() -> Isa:
    """The most capable that this processor runs, or the one that VLLMX_CPU_ISA names. Raises
    ConfigError for one that is unknown or not supported here."""
    usable = [isa for isa in instruction_sets() if isa.supported]
    wanted = os.environ.get(ISA_VARIABLE)
    if not wanted:
        return usable[-1]
    for isa in usable:
        if isa.name == wanted:
            return isa
    raise ConfigError(
        f"{ISA_VARIABLE}={wanted} cannot be used: this processor and build offer"
        f" {', '.join(isa.name for isa in usable)}",
        param=ISA_VARIABLE,
    )


class Team:
    """The native threads that run steps. Close it; jobs in flight are waited for."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._handle: int | None = library().vx_team_create(num_threads, SCRATCH_BYTES)
        if not self._handle:
            raise CapacityError(
                f"{num_threads} threads with {SCRATCH_BYTES} bytes each cannot be started: lower"
                " --num-threads or raise the process limit (ulimit -u)",
                param="num_threads",
            )

    def submit(self, job: VxJob) -> None:
        """Enqueues a job and returns; the job and all that it points to must stay until `wait`."""
        result = library().vx_submit(self._handle, byref(job))
        assert result == 0, "more steps in flight than the queue holds"

    def wait(self, job: VxJob) -> None:
        library().vx_wait(self._handle, byref(job))

    def run(self, job: VxJob) -> None:
        self.submit(job)
        self.wait(job)

    def close(self) -> None:
        if self._handle:
            library().vx_team_destroy(self._handle)
            self._handle = None
