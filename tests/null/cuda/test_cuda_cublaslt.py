"""cuBLASLt's descriptors, which need the library and no GPU, and NVRTC on our own kernels."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.compiler.cubins import KERNELS_FOLDER, Target, Unit
from vllmx_cuda.compiler.libraries import include_folders
from vllmx_cuda.compiler.nvrtc import CompileError, Nvrtc
from vllmx_cuda.device.algorithms import AlgorithmFile, Algorithms
from vllmx_cuda.device.arch import ARCHITECTURES
from vllmx_cuda.device.cublaslt import Addresses, Algorithm, CublasLt, CublasLtError, Matmul
from vllmx_cuda.device.device import Product
from vllmx_cuda.device.driver import unavailable_reason


@pytest.fixture(scope="module")
def lt() -> CublasLt:
    try:
        return CublasLt.open(with_handle=False)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc.open()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("out_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_descriptors(lt: CublasLt, dtype: str, out_dtype: str) -> None:
    matmul = Matmul(lt, Product(7, 33, 130, dtype, out_dtype, biased=True))
    assert (matmul.attribute(3), matmul.attribute(4)) == (1, 0), "w transposed, x not"
    assert matmul.attribute(7) == 4, "a bias"
    assert matmul.attribute(26) == {"f32": 0, "f16": 2, "bf16": 14}[out_dtype]
    matmul.point(Addresses(bias=1 << 20))
    matmul.close()


@pytest.mark.parametrize("blocks", [False, True])
def test_descriptors_of_fp8(lt: CublasLt, blocks: bool) -> None:
    """Blocks of 128 x 128 of w and 128 columns of x have scales of their own: modes 5 and 4 of
    cublasLtMatmulMatrixScale_t. Their sums are not the fast ones."""
    if blocks and lt.version < 120900:
        pytest.skip("this library has no scales of blocks")
    matmul = Matmul(lt, Product(16, 32, 512, "f8e4m3", "bf16", blocks=blocks))
    assert (matmul.attribute(31), matmul.attribute(32)) == ((5, 4) if blocks else (0, 0))
    assert matmul.attribute(25, 1) == (not blocks)
    matmul.point(Addresses(w_scale=4096, x_scale=8192))
    assert (matmul.attribute(17, 8), matmul.attribute(18, 8)) == (4096, 8192)
    matmul.close()


def test_descriptors_of_int8(lt: CublasLt) -> None:
    """Sums in 32-bit integers, columns of a wider product."""
    matmul = Matmul(lt, Product(5, 32, 64, "i8", "i32", pitch=96))
    assert (matmul.attribute(0), matmul.attribute(1)) == (72, 10)
    matmul.close()


def test_an_algorithm_of_no_library_is_not_accepted(lt: CublasLt) -> None:
    matmul = Matmul(lt, Product(5, 32, 64, "bf16", "bf16"))
    assert matmul.fitting(Algorithm(bytes(64), 0)) is None
    matmul.close()


class OlderLibrary:
    """Every call succeeds, but for attributes that came later; counts what is open."""

    def __init__(self, version: int, attributes: int) -> None:
        self.cublasLtGetVersion = lambda: version
        self._attributes, self.open = attributes, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name.endswith("Create"):
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 4096
                self.open += 1
            if name.endswith("Destroy"):
                self.open -= 1
            too_new = name.endswith("DescSetAttribute") and arguments[1] >= self._attributes
            return 7 if too_new else 0

        return call


@pytest.mark.parametrize(
    ("version", "attributes", "reason"),
    [
        (120405, 31, r"12\.4 .* no FP8 scales of blocks.*nvidia-cublas-cu12"),
        (120803, 40, r"12\.8 .* no FP8 scales of blocks"),
        (130100, 31, "status 7"),
    ],
)
def test_an_older_library_says_no(
    version: int, attributes: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once, nothing left open; what it does know goes on."""
    caplog.set_level("INFO", "vllmx")
    library = OlderLibrary(version, attributes)
    lt = CublasLt(library, "libcublasLt.so.12", ctypes.c_void_p())  # type: ignore[arg-type]
    product = Product(16, 128, 512, "f8e4m3", "bf16", blocks=True)
    with pytest.raises(CublasLtError, match=reason):
        Matmul(lt, product)
    algorithms = Algorithms(lt, AlgorithmFile(Path("/nowhere/choices.json")), lambda call, n: 1.0)
    assert not algorithms.exists(product)
    assert not algorithms.exists(replace(product, m=32))
    (line,) = caplog.messages
    assert re.search(reason, line)
    assert library.open == 0
    Matmul(lt, replace(product, blocks=False)).close()
    assert library.open == 0


def test_without_a_gpu_the_library_says_so(lt: CublasLt) -> None:
    if unavailable_reason() is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackendUnavailableError, match="cannot start, status"):
        CublasLt.open()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_compiles_for_every_architecture(nvrtc: Nvrtc, arch: str) -> None:
    nvrtc.check_architecture(arch)
    target = Target(arch, nvrtc.version, tuple(include_folders()))
    unit = Unit(KERNELS_FOLDER / "rms_norm.cu", ("VX_DTYPE=2", "VX_VEC=8"))
    cubin = nvrtc.compile(unit.source.read_text(), unit.source.name, target.options(unit))
    assert cubin[:4] == b"\x7fELF"


def test_errors_of_a_source_are_shown(nvrtc: Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"(?s)k\.cu.*identifier .nonsense. is undefined"):
        nvrtc.compile("int x = nonsense;", "k.cu", ["--gpu-architecture=sm_80"])
    with pytest.raises(BackendUnavailableError, match=r"sm_52.*knows"):
        nvrtc.check_architecture("sm_52")
