"""cuBLASLt by ctypes: products of row-major matrices, on the caller's stream and workspace, so that
they may be captured (CuPy's binding of cuBLAS refuses that, and has no cuBLASLt).

The library is column-major: y = x @ w.T is asked for as y.T = w @ x.T, with w as the transposed A.
That form is the only one that Hopper takes for FP8. Constants are those of cublasLt.h and
library_types.h.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from vllmx_core.errors import BackendUnavailableError, VllmxError

from vllmx_cuda.compiler.libraries import MAJORS, open_library
from vllmx_cuda.device.device import Product

DATA_TYPES = {"f32": 0, "f16": 2, "bf16": 14, "f8e4m3": 28, "i8": 3, "i32": 10}
"""cudaDataType of our names."""
_COMPUTE_32F, _COMPUTE_32I = 68, 72
_OP_N, _OP_T = 0, 1
_EPILOGUE_BIAS = 4
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER, _DESC_FAST_ACCUM = 17, 18, 25
_DESC_BIAS_TYPE, _DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE = 26, 31, 32
_PREFERENCE_MAX_WORKSPACE = 1
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
_NOT_SUPPORTED = 15
ALLOC_FAILED = 3
"""cublasStatus_t of a call for which the library found no memory."""

_SCALE_128X128, _SCALE_1X128 = 5, 4  # of w, of x: Hopper alone
_SCALES_OF_BLOCKS = 120900
"""The first version with them."""
WORKSPACE_BYTES = 32 << 20
"""NVIDIA's recommendation for Hopper."""
_HANDLE, _OUT = c_void_p, POINTER(c_void_p)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, opaque."""

    _fields_ = (("data", c_uint64 * 8),)


ALGORITHM_BYTES = ctypes.sizeof(_Algorithm)


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [_OUT],
    "cublasLtDestroy": [_HANDLE],
    "cublasLtMatmulDescCreate": [_OUT, c_int, c_int],
    "cublasLtMatmulDescDestroy": [_HANDLE],
    "cublasLtMatmulDescSetAttribute": [_HANDLE, c_int, c_void_p, c_size_t],
    "cublasLtMatmulDescGetAttribute": [_HANDLE, c_int, c_void_p, c_size_t, POINTER(c_size_t)],
    "cublasLtMatrixLayoutCreate": [_OUT, c_int, c_uint64, c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_HANDLE],
    "cublasLtMatmulPreferenceCreate": [_OUT],
    "cublasLtMatmulPreferenceDestroy": [_HANDLE],
    "cublasLtMatmulPreferenceSetAttribute": [_HANDLE, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [
        *[_HANDLE] * 7,
        c_int,
        POINTER(_Proposal),
        POINTER(c_int),
    ],
    "cublasLtMatmulAlgoCheck": [*[_HANDLE] * 6, c_void_p, POINTER(_Proposal)],
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


class CublasLtError(VllmxError):
    """The library refused a call.

    Args:
        status: its cublasStatus_t, 0 where the library was not asked.
    """

    code = "cublaslt_error"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class CublasLt:
    """The opened library, with a handle where there is a device."""

    library: ctypes.CDLL
    path: str
    handle: c_void_p

    @classmethod
    def open(cls, newest: int = MAJORS[0], *, with_handle: bool = True) -> CublasLt:
        """Opens the library; `newest`: see `open_library`. Without a handle it makes descriptors
        alone. Raises BackendUnavailableError without the library, or when it finds no device."""
        library, path = open_library("cublasLt", newest)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        handle = c_void_p()
        status = library.cublasLtCreate(byref(handle)) if with_handle else 0
        if status:
            raise BackendUnavailableError(
                f"cuBLASLt ({path}) cannot start, status {status}: driver and library do not fit"
                " together, or the GPU has no memory left: see vllmx env"
            )
        return cls(library, path, handle)

    @property
    def version(self) -> int:
        """The version of the library as one number, such as 120900."""
        return int(self.library.cublasLtGetVersion())

    def close(self) -> None:
        if self.handle.value:
            self.library.cublasLtDestroy(self.handle)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a product, as the library numbers it."""

    data: bytes
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Addresses:
    """Device memory that belongs to a descriptor; 0: none."""

    bias: int = 0
    w_scale: int = 0
    x_scale: int = 0


class Matmul:
    """Descriptors of one product."""

    def __init__(self, lt: CublasLt, product: Product) -> None:
        """Raises CublasLtError for what the library has no words for."""
        self.product = product
        self._lt, self._library = lt, lt.library
        self._descriptor, self._pointers = c_void_p(), dict[int, int]()
        self._w, self._x, self._y = c_void_p(), c_void_p(), c_void_p()
        version = lt.version
        if product.blocks and version < _SCALES_OF_BLOCKS:
            raise CublasLtError(
                f"cuBLASLt {version // 10000}.{version // 100 % 100} ({lt.path}) has no FP8 scales"
                " of blocks, 12.9 has: pip install --upgrade nvidia-cublas-cu12"
            )
        try:
            self._describe(product)
        except CublasLtError:
            self.close()
            raise

    def _describe(self, product: Product) -> None:
        integers = product.dtype == "i8"  # then alpha and beta are integers as well
        number: Any = c_int if integers else c_float
        self._one, self._zero = number(1), number(0)
        self._check(
            self._library.cublasLtMatmulDescCreate(
                byref(self._descriptor),
                _COMPUTE_32I if integers else _COMPUTE_32F,
                DATA_TYPES["i32" if integers else "f32"],
            )
        )
        self._set(_DESC_TRANSA, c_int(_OP_T))
        self._set(_DESC_TRANSB, c_int(_OP_N))
        if product.biased:
            self._set(_DESC_EPILOGUE, c_uint32(_EPILOGUE_BIAS))
            self._set(_DESC_BIAS_TYPE, c_int(DATA_TYPES[product.out_dtype]))
        if product.dtype == "f8e4m3":  # blocks have sums of their own in float32
            self._set(_DESC_FAST_ACCUM, ctypes.c_int8(not product.blocks))
        if product.blocks:
            self._set(_DESC_A_SCALE_MODE, c_int(_SCALE_128X128))
            self._set(_DESC_B_SCALE_MODE, c_int(_SCALE_1X128))
        m, n, k = product.m, product.n, product.k
        self._w = self._layout(product.dtype, k, n)
        self._x = self._layout(product.dtype, k, m)
        self._y = self._layout(product.out_dtype, n, m, product.pitch)

    def attribute(self, number: int, num_bytes: int = 4) -> int:
        """An attribute of the descriptor, for tests."""
        value, written = c_uint64(), c_size_t()
        self._check(
            self._library.cublasLtMatmulDescGetAttribute(
                self._descriptor, number, byref(value), num_bytes, byref(written)
            )
        )
        return value.value

    def point(self, addresses: Addresses) -> None:
        """A call that is captured keeps those of its time."""
        for number, address in (
            (_DESC_BIAS_POINTER, addresses.bias),
            (_DESC_A_SCALE_POINTER, addresses.w_scale),
            (_DESC_B_SCALE_POINTER, addresses.x_scale),
        ):
            if address and self._pointers.get(number) != address:
                self._set(number, c_void_p(address))
                self._pointers[number] = address

    def algorithms(self, most: int, workspace_bytes: int = WORKSPACE_BYTES) -> list[Algorithm]:
        """The library's proposals, its favourite first. Raises CublasLtError when there is none."""
        preference, count = c_void_p(), c_int()
        found = (_Proposal * most)()
        wanted: list[tuple[int, Any]] = [(_PREFERENCE_MAX_WORKSPACE, c_size_t(workspace_bytes))]
        wanted += [(n, c_uint32(self.product.alignment)) for n in _PREFERENCE_ALIGNMENTS]
        self._check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            for number, value in wanted:
                self._check(
                    self._library.cublasLtMatmulPreferenceSetAttribute(
                        preference, number, byref(value), ctypes.sizeof(value)
                    )
                )
            status = self._library.cublasLtMatmulAlgoGetHeuristic(
                self._lt.handle,
                self._descriptor,
                self._w,
                self._x,
                self._y,
                self._y,
                preference,
                most,
                found,
                byref(count),
            )
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        self._check(status)
        usable = [
            Algorithm(bytes(p.algorithm), p.workspace_bytes)
            for p in found[: count.value]
            if p.state == 0
        ]
        if not usable:
            self._check(_NOT_SUPPORTED)
        return usable

    def fitting(
        self, algorithm: Algorithm, workspace_bytes: int = WORKSPACE_BYTES
    ) -> Algorithm | None:
        """An algorithm that was stored, with the workspace that it needs here. None where this GPU
        and library do not compute the product by it: it was made for another number of rows,
        another GPU of the same name may lack it, and a file may be damaged."""
        chosen, found = _Algorithm.from_buffer_copy(algorithm.data), _Proposal()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._lt.handle,
            self._descriptor,
            self._w,
            self._x,
            self._y,
            self._y,
            byref(chosen),
            byref(found),
        )
        if status or found.workspace_bytes > workspace_bytes:
            return None
        return Algorithm(algorithm.data, found.workspace_bytes)

    def run(
        self, algorithm: Algorithm, x: int, w: int, y: int, workspace: int, stream: int
    ) -> None:
        """Enqueues the product of the arrays at these device addresses."""
        chosen = _Algorithm.from_buffer_copy(algorithm.data)
        status = self._library.cublasLtMatmul(
            self._lt.handle,
            self._descriptor,
            byref(self._one),
            w,
            self._w,
            x,
            self._x,
            byref(self._zero),
            y,
            self._y,
            y,
            self._y,
            byref(chosen),
            workspace,
            algorithm.workspace_bytes,
            stream,
        )
        self._check(status)

    def close(self) -> None:
        for layout in (self._w, self._x, self._y):
            if layout:
                self._library.cublasLtMatrixLayoutDestroy(layout)
        if self._descriptor:
            self._library.cublasLtMatmulDescDestroy(self._descriptor)

    def _set(self, number: int, value: Any) -> None:
        self._check(
            self._library.cublasLtMatmulDescSetAttribute(
                self._descriptor, number, byref(value), ctypes.sizeof(value)
            )
        )

    def _layout(self, dtype: str, rows: int, cols: int, pitch: int = 0) -> c_void_p:
        """A column-major matrix, its columns without gaps or `pitch` apart."""
        layout = c_void_p()
        self._check(
            self._library.cublasLtMatrixLayoutCreate(
                byref(layout), DATA_TYPES[dtype], rows, cols, pitch or rows
            )
        )
        return layout

    def _check(self, status: int) -> None:
        if status:
            reason = "no algorithm for it" if status == _NOT_SUPPORTED else f"status {status}"
            raise CublasLtError(
                f"cuBLASLt ({self._lt.path}) refuses {self.product}: {reason}", status
            )
