"""Launches emulated kernels on numpy arrays."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_cuda.kernel_specs.types import Argument, Kernel, Launch, Sizes, Variant

from vllmx_testing.cuda.emulator.build import KERNELS, build_module
from vllmx_testing.cuda.emulator.peers import PeerGroup

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
"""The orders in which the threads of a block run between two barriers."""
_POISON = 0xFF  # NaN in every float format
_ALIGNMENT = 256  # of a CUDA allocation

_VALUES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}


class KernelFault(AssertionError):
    """A kernel did what a GPU would not forgive; the message names the source line."""


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array aligned as a device allocation is, with every bit set: NaN in every float type."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.full(count + _ALIGNMENT, _POISON, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(kind).reshape(shape)


class Emulator:
    """Compiles variants on first use and runs them, one launch at a time.

    Args:
        check: the instrumented build: slower, finds races, bad accesses, uninitialised reads.
        order: see `ORDERS`; a kernel must give the same result in each.
        folder: where the sources are.
        peers: the group of ranks that its kernels wait for, and which one of them it is.
    """

    def __init__(
        self,
        *,
        check: bool = False,
        order: str = "forward",
        folder: Path = KERNELS,
        peers: tuple[PeerGroup, int] | None = None,
    ) -> None:
        self.check = check
        self.order = order
        self.folder = folder
        self.peers = peers
        self._modules: dict[tuple[str, tuple[str, ...]], _Module] = {}
        self._lock = threading.Lock()

    def launch(
        self,
        variant: Variant,
        sizes: Sizes,
        arguments: Sequence[npt.NDArray[Any] | int | float | None],
        *,
        seed: int = 0,
    ) -> None:
        """Runs the whole grid and returns.

        Args:
            arguments: in the order of the description: a C-contiguous array for a pointer (None for
                an optional one that is absent), a number for a value.
            seed: of the order "random".

        Raises:
            KernelFault: the kernel broke a rule.
            TypeError: the arguments do not fit the description.
        """
        shape = variant.launch(sizes)
        with self._lock:
            module = self._module(variant)
            with self.peers[0].taking_turns(self.peers[1]) if self.peers else nullcontext():
                module.launch(variant, shape, arguments, ORDERS[self.order], seed)

    def shared_bytes(self, variant: Variant, sizes: Sizes) -> int:
        """Shared memory of a block, dynamic and static. An upper bound: the static arrays are those
        of all entries of the source."""
        with self._lock:
            static = self._module(variant).static_bytes
        return variant.launch(sizes).shared_bytes + static

    def _module(self, variant: Variant) -> _Module:
        module = self._modules.get(variant.module_key)
        if module is None:
            source = self.folder / variant.kernel.source
            path = build_module(source, variant.defines, check=self.check)
            self._modules[variant.module_key] = module = self._load(path)
        return module

    def _load(self, path: Path) -> _Module:
        if self.peers is None:
            return _Module(path, ctypes.CDLL(str(path)))
        group, rank = self.peers
        return _Module(*group.load(path, rank))


_free_stacks: list[int] = []
"""Addresses of stacks that no launch uses: hundreds of modules share those of as many launches as
ever ran at once."""


@contextmanager
def _stacks(library: ctypes.CDLL) -> Iterator[int]:
    """Stacks of a block's threads for one launch. Raises MemoryError."""
    try:
        stacks = _free_stacks.pop()
    except IndexError:
        stacks = library.emu_make_stacks() or 0
    if not stacks:
        raise MemoryError(
            "no memory or no mappings are left for an emulated block: see vm.max_map_count"
        )
    try:
        yield stacks
    finally:
        _free_stacks.append(stacks)


class _Module:
    """One loaded library."""

    def __init__(self, path: Path, library: ctypes.CDLL) -> None:
        self.path = path
        self.library = library
        self.library.emu_error.restype = ctypes.c_char_p
        self.library.emu_add_buffer.argtypes = [
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self.library.emu_launch.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
        ]
        self.library.emu_make_stacks.restype = ctypes.c_void_p
        self.library.emu_static_shared.restype = ctypes.c_size_t
        self.static_bytes: int = self.library.emu_static_shared()

    def launch(
        self,
        variant: Variant,
        shape: Launch,
        values: Sequence[npt.NDArray[Any] | int | float | None],
        order: int,
        seed: int,
    ) -> None:
        kernel = variant.kernel
        if len(values) != len(kernel.arguments):
            raise TypeError(
                f"{kernel.entry} takes {len(kernel.arguments)} arguments, got {len(values)}"
            )
        self.library.emu_clear_buffers(int(kernel.early is not None))
        # the C values must outlive the call, the array of their addresses is what a launch takes
        converted = [
            self._convert(kernel, argument, value)
            for argument, value in zip(kernel.arguments, values, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(converted))(*map(ctypes.addressof, converted))
        # CuPy launches a block where a dimension is 0: who has nothing to do must not launch.
        grid = (ctypes.c_uint * 4)(*(max(1, size) for size in shape.grid), shape.block)
        entry = ctypes.cast(self.library[f"emu_entry_{kernel.entry}"], ctypes.c_void_p)
        with _stacks(self.library) as stacks:
            failed = self.library.emu_launch(
                entry, grid, addresses, shape.shared_bytes, order, seed, stacks
            )
        if failed:
            message = self.library.emu_error().decode()
            raise KernelFault(f"{kernel.entry}: {self._with_lines(message)}")

    def _convert(
        self, kernel: Kernel, argument: Argument, value: npt.NDArray[Any] | int | float | None
    ) -> ctypes._SimpleCData[Any]:
        entry, early = kernel.entry, argument.name in (kernel.early or ())
        if not argument.is_pointer:
            if isinstance(value, np.ndarray) or value is None:
                raise TypeError(f"{entry}: {argument.name} is a {argument.ctype}, got {value!r}")
            return _VALUES[argument.ctype](value)
        if value is None and argument.optional:
            return ctypes.c_void_p(None)
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
            raise TypeError(f"{entry}: {argument.name} must be a contiguous array, got {value!r}")
        read_only = argument.direction == "in" or not value.flags.writeable
        self.library.emu_add_buffer(value.ctypes.data, value.nbytes, int(read_only), int(early))
        return ctypes.c_void_p(value.ctypes.data)

    def _with_lines(self, message: str) -> str:
        """Program counters -> file and line."""

        def line_of(match: re.Match[str]) -> str:
            maps = Path("/proc/self/maps").read_text().splitlines()
            base = min(int(line.split("-")[0], 16) for line in maps if str(self.path) in line)
            address = hex(int(match[1], 16) - base - 1)
            command = ["addr2line", "-e", str(self.path), address]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            return f"at {Path(done.stdout.strip()).name}"

        return re.sub(r"pc=(0x[0-9a-f]+)", line_of, message)
