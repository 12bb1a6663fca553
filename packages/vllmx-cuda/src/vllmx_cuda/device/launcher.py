"""Launches kernels by cuLaunchKernelEx through ctypes.

A launch takes the host 1 to 2 us, since everything that does not change is made once: the function,
the places of its arguments, and a configuration for each set of sizes. CUDA copies the arguments
before the call returns, so one buffer serves all launches of a kernel.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.types import Launch

_MOST_CONFIGS = 1024
_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "f32": "f"}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


_EARLY = LaunchAttribute(6, b"", 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Launcher:
    """Launches one kernel on one stream.

    Args:
        launch: cuLaunchKernelEx.
        function: the kernel's CUfunction.
        prepare: called with the shape of the first launch of each set of sizes.
        early: True if it may begin before the launch before it has ended; captured, such a launch
            makes an edge of that kind in the graph.
    """

    def __init__(
        self,
        launch: Any,
        variant: Variant,
        function: int,
        stream: int,
        prepare: Callable[[Launch], None],
        *,
        early: bool = False,
    ) -> None:
        self.variant = variant
        self._launch, self._stream, self._prepare = launch, stream, prepare
        self._function = ctypes.c_void_p(function)
        self._attributes = (ctypes.addressof(_EARLY), 1) if early else (None, 0)
        kinds = variant.kernel.arguments
        formats = ["Q" if kind.is_pointer else _FORMATS[kind.ctype] for kind in kinds]
        packed = struct.Struct("@" + "".join(formats))
        self._values = ctypes.create_string_buffer(packed.size)
        self._pack = packed.pack_into
        first = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * len(formats))()
        for i, form in enumerate(formats):
            end = struct.calcsize("@" + "".join(formats[: i + 1]))
            self._parameters[i] = first + end - struct.calcsize(form)
        self._configs: dict[tuple[tuple[str, int], ...], Any] = {}

    def __call__(
        self, sizes: Mapping[str, int], arguments: Sequence[Memory | int | float | None]
    ) -> int:
        """CUDA's status. Raises struct.error for a wrong number or type of arguments, and for a
        value that its parameter cannot hold."""
        key = tuple(sizes.items())
        config = self._configs.get(key, self)
        if config is self:
            if len(self._configs) == _MOST_CONFIGS:  # prompts of any length
                self._configs.clear()
            config = self._configs[key] = self._config(sizes)
        if config is None:
            return 0
        values = [v.address if v.__class__ is Memory else v or 0 for v in arguments]
        self._pack(self._values, 0, *values)
        status: int = self._launch(config, self._function, self._parameters, None)
        return status

    def _config(self, sizes: Mapping[str, int]) -> Any:
        """None: there is no block to launch."""
        shape = self.variant.launch(sizes)
        if 0 in shape.grid:
            return None
        self._prepare(shape)
        block, stream = (shape.block, 1, 1), self._stream
        return ctypes.byref(
            LaunchConfig(shape.grid, block, shape.shared_bytes, stream, *self._attributes)
        )
